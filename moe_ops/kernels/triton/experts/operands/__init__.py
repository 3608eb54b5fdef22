"""What x, h and weights become before products read them."""
