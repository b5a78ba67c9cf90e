"""The share of each part of the engine in a step's time."""
