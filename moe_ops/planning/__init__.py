"""Which backend runs each op, for which sizes: the plan, its choice, and the times it goes by."""
