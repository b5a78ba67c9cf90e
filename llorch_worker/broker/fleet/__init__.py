"""What the workers of a Redis know of each other, and how they share work."""
