"""How a call finds its program, and how all ranks make one."""
