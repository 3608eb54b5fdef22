"""The products of the experts, and what launches them."""
