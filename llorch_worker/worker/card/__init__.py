"""Choosing a worker's card: one worker per card."""
