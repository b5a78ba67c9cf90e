"""The Redis side of a job: key names, queues, connections, results, the registry of workers."""
