"""What Celery takes for its consumer of tasks: it says from which queues jobs are claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llorch_worker.worker.celery.job_message import JobMessage


class JobSource:
    """The methods of kombu's ``Consumer`` that Celery calls. Each connection for control commands
    has one."""

    on_message: Callable[[JobMessage], object]
    """What takes a job; Celery sets it."""

    def __init__(
        self,
        channel: Any,
        queues: Iterable[Any],
        *,
        on_queues: Callable[[tuple[str, ...]], object],
        on_prefetch_count: Callable[[int], object],
        on_close: Callable[[], object],
    ) -> None:
        """``channel`` and ``queues`` are kombu's; ``on_queues`` gets the names of those to claim
        from, ``on_prefetch_count`` the most jobs to hold."""
        self.queues = list(queues)
        self.channel = channel
        """With --disable-prefetch Celery changes how it consumes, which is of no consequence: a job
        is claimed only if there is room."""
        self._on_queues = on_queues
        self._on_prefetch_count = on_prefetch_count
        self._on_close = on_close

    def add_queue(self, queue: Any) -> None:
        self.queues.append(queue)

    def consume(self) -> None:
        for queue in self.queues:
            # For producers that name its exchange.
            queue(self.channel).declare()
        self._announce()

    def consuming_from(self, name: str) -> bool:
        return any(queue.name == name for queue in self.queues)

    def cancel_by_queue(self, name: str) -> None:
        self.queues = [queue for queue in self.queues if queue.name != name]
        self._announce()

    def cancel(self) -> None:
        """Also in a signal handler."""
        self._on_queues(())

    def close(self) -> None:
        self._on_close()

    def qos(self, prefetch_count: int = 0, **_: Any) -> None:
        self._on_prefetch_count(prefetch_count)

    def _announce(self) -> None:
        self._on_queues(tuple(queue.name for queue in self.queues))
