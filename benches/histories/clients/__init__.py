"""A module for each client, which only its own environment can import."""
