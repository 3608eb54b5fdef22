"""Checks of what a caller gives: signatures, options, shapes of tensors, and what errors say."""
