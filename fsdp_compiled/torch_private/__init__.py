"""Private parts of PyTorch that several files need, a module a surface: what is relied on, in which versions.

A new release of PyTorch that moves one of them is met here, or in the one file that alone needs a further one
(tests/house/test_imports.py lists these).
"""
