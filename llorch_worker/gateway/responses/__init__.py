"""Responses that are kept for a time."""
