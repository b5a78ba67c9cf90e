"""One trace of a job, from HTTP or a producer through the queue into the engine (OpenTelemetry)."""
