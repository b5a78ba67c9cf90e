"""What each command measures: its plan, its measuring and its document."""
