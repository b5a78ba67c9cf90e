"""Files of the gateway's keys: what they upload, and what batches write."""
