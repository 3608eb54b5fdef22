"""Device code: what the backends call."""
