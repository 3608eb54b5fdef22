"""Experts on sorted rows, or on a few tokens that nobody sorts."""
