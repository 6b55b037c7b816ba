"""Programs: what they are, what their nodes do, how they are changed, how they read."""
