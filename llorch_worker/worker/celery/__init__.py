"""The parts that Celery calls: the app, the task, the pool, the consumer and the bootstep."""
