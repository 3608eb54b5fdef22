"""Everything that touches a graph."""
