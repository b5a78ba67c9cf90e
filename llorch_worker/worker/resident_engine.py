"""What the worker needs of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llorch_worker.contract import Event, GenerationRequest, GenerationResult, Journal


class ResidentGeneration(Protocol):
    def cancel(self) -> None: ...
    def result(self, timeout: float | None = None) -> GenerationResult: ...


class ResidentEngine(Protocol):
    """See :class:`llorch_worker.engine.Engine`."""

    model_name: str
    max_context: int
    max_sequences: int

    @property
    def healthy(self) -> bool: ...

    def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        journal: Journal | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> ResidentGeneration: ...
    def stalled_for_s(self) -> float: ...
    def misplaced_tensors(self) -> tuple[str, ...]: ...
    def warm_up(self) -> None: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...
