"""``llorch submit --file``: many jobs, enqueued in order and awaited together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llorch_worker.cli.request_options import read_text
from llorch_worker.cli.terminal.interrupts import cancelling
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    LlorchError,
    QueueFull,
    describe,
)
from llorch_worker.contract.command_errors import FAILED, USAGE, CommandError, usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.client import AsyncClient, AsyncJob

ROOM_POLL_S = 1.0
EXCERPT_CHARS = 30
SHOWN_LINES = 3


@dataclass(frozen=True)
class Ended:
    """A job of the file and how it ended."""

    number: int
    id: str
    end: GenerationResult | LlorchError

    def document(self) -> dict[str, Any]:
        head = {"job": self.number, "id": self.id}
        if isinstance(self.end, GenerationResult):
            return head | {"result": self.end.model_dump(mode="json", exclude_none=True)}
        return head | {"error": self.end.document().model_dump(mode="json")}


def submit_file(
    screen: Screen,
    settings: Settings,
    path: str,
    defaults: dict[str, Any],
    *,
    worker: str | None,
    wait: bool,
    output: Path | None,
) -> None:
    """Enqueue the requests of ``path``; print their ids, or with ``wait`` how each job ended.

    Exits 1 if a job fails. Ctrl-C cancels the jobs that have not ended; ``output`` keeps the
    results of the others.
    """
    requests = _read_requests(path, defaults)
    # Opened first, because an unwritable path should not cost a night's work.
    with nullcontext(_ignore) if output is None else _written_to(output) as write:
        try:
            ended = asyncio.run(_run(screen, settings, requests, worker, write, wait=wait))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    if not wait:
        return
    failed = sum(isinstance(item.end, LlorchError) for item in ended)
    if screen.as_json:
        screen.document({"jobs": [item.document() for item in ended], "failed": failed})
    elif output is None:
        for item in ended:
            _show(screen, item)
    tokens = sum(e.end.usage.completion for e in ended if isinstance(e.end, GenerationResult))
    where = f", in {output}" if output is not None else ""
    screen.note(
        f"{counted(len(ended), 'job')}: {len(ended) - failed} done, {failed} failed, "
        f"{counted(tokens, 'token')}{where}"
    )
    if failed:
        raise typer.Exit(FAILED)


def _read_requests(path: str, defaults: dict[str, Any]) -> list[GenerationRequest]:
    """The requests of a JSON-lines file (``-`` is stdin); each line overrides ``defaults``.

    Raises:
        CommandError: names the first wrong lines and their errors.
    """
    if not defaults.keys().isdisjoint(("chat", "system")):
        raise usage_error("--chat and --system shape one prompt: in a file, use messages")
    requests, errors = [], []
    # Not splitlines: a JSON string may contain U+2028 and other line separators.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request_of_line(line, defaults))
        except InvalidRequest as error:
            errors.append(f"line {number}: {error.message}")
    if errors:
        more = len(errors) - SHOWN_LINES
        shown = errors[:SHOWN_LINES] + ([f"and {counted(more, 'more line')}"] if more > 0 else [])
        raise usage_error(f"{path}: {'; '.join(shown)}; nothing was enqueued")
    if not requests:
        raise usage_error(f"{path} has no jobs: give one JSON object per line")
    return requests


def _request_of_line(line: str, defaults: dict[str, Any]) -> GenerationRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        fault = Fault(field="line", rule=f"must be JSON ({error})", got=describe(line))
        raise InvalidRequest.from_faults([fault]) from None
    if not isinstance(fields, dict):
        fault = Fault(field="line", rule="must be one JSON object", got=describe(fields))
        raise InvalidRequest.from_faults([fault])
    return GenerationRequest(**{**defaults, **fields})


@contextmanager
def _written_to(path: Path) -> Iterator[Callable[[Ended], None]]:
    """Yields a function that takes jobs as they end, and writes them in the file's order."""
    held: dict[int, Ended] = {}
    due = 1
    with path.open("w", encoding="utf-8") as sink:

        def take(item: Ended) -> None:
            nonlocal due
            held[item.number] = item
            while due in held:
                write(held.pop(due))
                due += 1
            sink.flush()

        def write(item: Ended) -> None:
            sink.write(json.dumps(item.document(), ensure_ascii=False) + "\n")

        try:
            yield take
        finally:
            for number in sorted(held):
                write(held[number])


def _ignore(_: Ended) -> None: ...


async def _run(
    screen: Screen,
    settings: Settings,
    requests: list[GenerationRequest],
    worker: str | None,
    on_end: Callable[[Ended], None],
    *,
    wait: bool,
) -> list[Ended]:
    """Enqueue all, and with ``wait`` return how they ended; ``on_end`` receives each at once."""
    from llorch_worker.client import AsyncClient

    with cancelling():
        async with AsyncClient(settings) as client:
            batch = _Batch(screen, client, worker)
            try:
                await batch.enqueue(requests)
                if wait:
                    return await batch.ends(on_end)
            except CommandError:
                await batch.cancel()
                raise
            except asyncio.CancelledError:
                if wait:
                    screen.note("cancelling the jobs that have not ended")
                    await batch.cancel()
                else:
                    # They may run, and no other process knows their ids.
                    batch.show_ids()
                raise
            batch.show_ids()
            return []


class _Batch:
    """The enqueued jobs of one file."""

    def __init__(self, screen: Screen, client: AsyncClient, worker: str | None) -> None:
        self._screen = screen
        self._client = client
        self._worker = worker
        self._jobs: list[AsyncJob] = []

    async def enqueue(self, requests: list[GenerationRequest]) -> None:
        """Enqueue ``requests`` in order.

        Raises:
            CommandError: a job is refused; those before it are in the queue.
        """
        with self._screen.bar("enqueueing", "jobs") as advance:
            for request in requests:
                try:
                    await self._submit(request)
                except LlorchError as error:
                    raise _refused(len(self._jobs), error) from error
                advance(len(self._jobs), len(requests))

    async def _submit(self, request: GenerationRequest) -> None:
        """Enqueue one job once there is room, because a file may be longer than a queue."""
        from llorch_worker.client import BrokerUnavailable

        told = False
        while True:
            sending = asyncio.ensure_future(self._client.submit(request, worker=self._worker))
            try:
                self._jobs.append(await asyncio.shield(sending))
                return
            except asyncio.CancelledError:
                # It may already be enqueued, and must then be cancelled too.
                with suppress(LlorchError, BrokerUnavailable):
                    self._jobs.append(await sending)
                raise
            except QueueFull as error:
                if not told:
                    self._screen.note(f"waiting for room: {error.message}", "yellow")
                    told = True
            await asyncio.sleep(ROOM_POLL_S)

    async def ends(self, on_end: Callable[[Ended], None]) -> list[Ended]:
        """How each job ended, in the file's order."""
        done = 0

        async def end_of(number: int, job: AsyncJob) -> Ended:
            nonlocal done
            try:
                end: GenerationResult | LlorchError = await job.result()
            except LlorchError as error:
                end = error
            done += 1
            advance(done, len(self._jobs))
            ended = Ended(number, job.id, end)
            on_end(ended)
            return ended

        with self._screen.bar("generating", "jobs") as advance:
            advance(0, len(self._jobs))
            return await asyncio.gather(*(end_of(n, job) for n, job in enumerate(self._jobs, 1)))

    async def cancel(self) -> None:
        await asyncio.gather(*(job.cancel() for job in self._jobs))

    def show_ids(self) -> None:
        if self._screen.as_json:
            self._screen.document({"ids": [job.id for job in self._jobs]})
        else:
            self._screen.write_raw("".join(f"{job.id}\n" for job in self._jobs))


def _refused(enqueued: int, error: LlorchError) -> CommandError:
    others = (
        f"cancelled {counted(enqueued, 'job')} before it" if enqueued else "nothing was enqueued"
    )
    message = f"job {enqueued + 1} of the file: {error.message}; {others}"
    exit_code = USAGE if isinstance(error, InvalidRequest) else FAILED
    return CommandError(error.code, message, exit_code, error.faults)


def _show(screen: Screen, item: Ended) -> None:
    if isinstance(item.end, LlorchError):
        text = str(item.end)
    else:
        text = " ".join(item.end.choices[0].text.split())
        if len(text) > EXCERPT_CHARS:
            text = text[: EXCERPT_CHARS - 1] + "…"
    screen.line(f"{item.number:>4}  {item.id}  {text}")
