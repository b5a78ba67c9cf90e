"""Terminal output, errors and interrupts of all commands."""
