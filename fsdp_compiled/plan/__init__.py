"""Who is gathered with whom, and where every element lives: arithmetic, no graphs."""
