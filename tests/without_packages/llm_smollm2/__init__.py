"""Hides the package of this name, so that ``demo`` is the story model in every test that does not
ask for SmolLM2."""
