"""A battle: jobs under load, workers that die at random, and a ledger that forgets nothing."""
