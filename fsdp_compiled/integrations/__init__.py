"""Adapters for other people's loops, a file each. Nothing else imports them, and each needs its framework."""
