"""What a program is predicted to take: time and memory."""
