"""A battle test: jobs under load, workers that die at random, and an independent ledger."""
