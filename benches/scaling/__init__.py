"""How cost grows with the queue and with the context."""
