"""Equal blocks, which are not traced one by one."""
