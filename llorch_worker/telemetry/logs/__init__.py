"""How lines of the log look, and how often they repeat."""
