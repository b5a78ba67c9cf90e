"""Where Prometheus reads this worker's metrics. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llorch_worker.broker.ended_jobs import ENDED_JOBS
from llorch_worker.telemetry.metrics.server import serve
from llorch_worker.telemetry.metrics.step_figures import StepFigures
from llorch_worker.telemetry.metrics.worker_metrics import WorkerFigures, WorkerMetrics

if TYPE_CHECKING:
    from llorch_worker.engine import Engine


class MetricsEndpoint:
    """Counts steps and ends of jobs, and serves them at a port. If all ports are taken it counts
    nothing: a worker without metrics still works."""

    def __init__(
        self, engine: Engine, read: Callable[[], WorkerFigures], host: str, first_port: int
    ) -> None:
        steps = StepFigures()
        self._metrics = WorkerMetrics(engine.model_name, read, steps)
        self._server = serve(self._metrics.registry, host, first_port)
        if self._server is not None:
            engine.observe(steps)
            ENDED_JOBS.observe(self._metrics.job_ended)

    @property
    def host(self) -> str | None:
        return None if self._server is None else self._server.host

    @property
    def port(self) -> int | None:
        return None if self._server is None else self._server.port

    def close(self) -> None:
        ENDED_JOBS.forget(self._metrics.job_ended)
        if self._server is not None:
            self._server.close()
