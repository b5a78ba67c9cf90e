"""Choosing the next token of each sequence."""
