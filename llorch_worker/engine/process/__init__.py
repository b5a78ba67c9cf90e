"""An engine in a process of its own, and the keeper's side of it."""
