"""The ranks: mesh and agreement, what each of them calls, and what happens where they part."""
