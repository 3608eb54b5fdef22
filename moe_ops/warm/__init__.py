"""What `python -m moe_ops warm` does: it calls a model so that the caches of compiled code fill."""
