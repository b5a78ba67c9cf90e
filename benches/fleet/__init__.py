"""What a fleet costs Redis, and how soon and how evenly it claims."""
