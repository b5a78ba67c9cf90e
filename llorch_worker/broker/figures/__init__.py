"""What Redis shows to people and to metrics."""
