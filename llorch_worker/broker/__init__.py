"""The Redis side of a job, and of the fleet that works on jobs."""
