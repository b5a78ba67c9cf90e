"""The growth of cost with the queue and with the context."""
