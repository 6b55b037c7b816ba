"""A model that is cut along the tp axis."""
