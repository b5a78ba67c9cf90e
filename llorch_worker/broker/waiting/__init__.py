"""Jobs on their way to a worker: the inbox, what waits, and what wakes a worker."""
