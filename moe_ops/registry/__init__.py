"""The registry: ops and their backends, and what decides which backend runs a call."""
