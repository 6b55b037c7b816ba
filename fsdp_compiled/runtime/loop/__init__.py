"""Loops of the user's own: `fully_shard` and `compile_optimizer`."""
