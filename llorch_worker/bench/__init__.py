"""What ``llorch bench`` measures."""
