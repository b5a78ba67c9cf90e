"""How memory is planned, measured and refused."""
