"""HTTP: an OpenAI-compatible API, jobs and batches. A client of the queue like any other."""
