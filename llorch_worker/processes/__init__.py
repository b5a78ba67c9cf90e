"""A worker's processes: how its keeper starts others and talks to them. Imports no torch."""
