"""Which card a worker uses, and the check that everything stays on it."""
