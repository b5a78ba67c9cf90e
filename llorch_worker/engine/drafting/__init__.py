"""Drafters: guesses of a text's next tokens, which the engine checks several at a time."""
