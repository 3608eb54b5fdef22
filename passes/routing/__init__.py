"""Reading the routers of post-grad graphs, for `lift_router`."""
