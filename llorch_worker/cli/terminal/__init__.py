"""What commands share at the terminal: output, errors and interrupts."""
