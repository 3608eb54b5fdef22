"""Living beside torch's compiler, Python's imports, and callers who interrupt."""
