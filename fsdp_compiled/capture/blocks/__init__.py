"""Handles a model's equal blocks, so that they are not traced one by one."""
