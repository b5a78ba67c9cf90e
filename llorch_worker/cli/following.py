"""Waiting for one job and printing what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.terminal.story import StoryPrinter, summary_line
from llorch_worker.contract import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from llorch_worker.client import Job


def follow(screen: Screen, job: Job, *, request: GenerationRequest | None, live: bool) -> None:
    """Print the job's text, token by token if ``live``, else when it is there; then how it went.

    ``request`` is known where this very command sent it.

    Raises:
        LlorchError: the job failed or was cancelled.
    """
    opening = request.prompt if request is not None else None
    printer = StoryPrinter(screen, choices=request.n if request else 1, opening=opening)
    if live and not screen.as_json:
        try:
            for entry in job.stream():
                printer.show(entry.event)
        finally:
            printer.end()
        result = job.result()
    else:
        with _spinner(screen, f"waiting for {job.id}"):
            result = job.result()
        if not screen.as_json:
            printer.show_result(result)
    _finish(screen, result)


def _finish(screen: Screen, result: GenerationResult) -> None:
    if screen.as_json:
        screen.document(result.model_dump(mode="json", exclude_none=True))
    else:
        screen.note(summary_line(result))


@contextmanager
def _spinner(screen: Screen, text: str) -> Iterator[None]:
    if screen.live:
        with screen.err.status(text):
            yield
    else:
        yield
