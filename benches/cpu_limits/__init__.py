"""What the processor can do at most, beside which every speed stands."""
