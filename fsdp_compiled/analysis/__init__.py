"""What a program is predicted to take: time, memory; and its stages as files."""
