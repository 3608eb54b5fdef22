"""Which rows which program multiplies, and the sum of what comes of them."""
