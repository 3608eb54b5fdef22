"""Humming as far as `bench layer` calls it, computed from what it is handed, on the CPU."""
