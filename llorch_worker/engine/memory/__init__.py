"""Planning and measuring memory, and errors when it does not suffice."""
