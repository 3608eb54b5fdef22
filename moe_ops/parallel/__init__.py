"""How a layer is shared among ranks: sizes and ranks, who holds which expert, balancing loads."""
