"""What there is to look at of a step: its stages as files, a page with all of them, and traces."""
