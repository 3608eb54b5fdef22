"""The passes in Inductor: the hook, its cache key, and compiling with it."""
