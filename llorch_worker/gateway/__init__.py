"""HTTP: an OpenAI-compatible API, jobs and batches. A client of the queue like any other."""

from llorch_worker.telemetry.traces import api

# FastAPI imports OpenTelemetry's API, even without traces.
api.load()
