"""Loops of the user's own: `fully_shard`."""
