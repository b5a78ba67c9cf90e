"""Running a file of requests from a terminal."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_worker.batches.driver import Driver
from llorch_worker.batches.endpoints import ENDPOINTS
from llorch_worker.batches.lines import BareLine, Line, OpenAILine, OpenAIRules, fields_of
from llorch_worker.batches.raw_lines import RawLine, Survey, raw_lines, read_blocks, survey
from llorch_worker.broker.connections.url import safe_url
from llorch_worker.cli.batch_output import BatchOutput, written_to
from llorch_worker.cli.terminal.interrupts import cancelling
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.client import AsyncClient, BrokerUnavailable
from llorch_worker.contract import ModelNotServed, QueueFull
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings


@dataclass(frozen=True)
class Done:
    """``lines`` and ``failed`` are those of the whole output, ``lines_per_s`` of this run."""

    lines: int
    failed: int
    lines_per_s: float


def run_file(
    screen: Screen,
    settings: Settings,
    path: Path,
    output: Path,
    defaults: dict[str, Any],
    *,
    window: int,
) -> Done:
    """Runs the lines of ``path`` that ``output`` does not answer yet.

    Raises:
        CommandError: the file cannot be run, or the output is another's.
    """
    if str(path) == "-":
        raise usage_error("give a file: a run that was stopped reads its lines again")
    found = _survey(path)
    key = json.dumps(defaults, sort_keys=True)
    digest = hashlib.sha256(f"{found.digest} {key}".encode()).hexdigest()
    with written_to(output, digest) as written:
        if written.lines:
            screen.note(f"going on after {counted(written.lines, 'line')}")
        before, began_s = written.lines, time.monotonic()
        run = _Run(screen, path, defaults, found, written)
        try:
            asyncio.run(run.run(settings, window))
        except asyncio.CancelledError:
            screen.note(
                f"stopped after {written.lines} of {counted(found.lines, 'line')}; up to {window} "
                "more may be in the queue. The same command goes on and takes their results"
            )
            raise KeyboardInterrupt from None
        took_s = time.monotonic() - began_s
        return Done(written.lines, written.failed, (written.lines - before) / took_s)


def _survey(path: Path) -> Survey:
    try:
        with path.open("rb") as file:
            found = survey(file)
    except ValueError as error:
        raise usage_error(f"{path}: {error}") from None
    if not found.lines:
        raise usage_error(f"{path} has no requests: give one JSON object per line")
    return found


class _Run:
    def __init__(
        self,
        screen: Screen,
        path: Path,
        defaults: dict[str, Any],
        found: Survey,
        output: BatchOutput,
    ) -> None:
        self._screen = screen
        self._path = path
        self._defaults = defaults
        self._total = found.lines
        self._rules = OpenAIRules(ENDPOINTS, found.repeated)
        self._output = output
        self._reported: set[type] = set()

    async def run(self, settings: Settings, window: int) -> None:
        with cancelling():
            async with AsyncClient(settings) as client:
                await self._check_workers(client)
                driver = Driver(client, self._output.run_id, window=window, on_wait=self._tell)
                with self._screen.bar("generating", "lines", long=True) as advance:
                    await self._write(driver, advance)

    async def _write(self, driver: Driver, advance: Callable[[int, int], None]) -> None:
        advance(self._output.lines, self._total)
        async with aclosing(driver.ends(self._lines())) as ends:
            async for line, end in ends:
                self._output.write(line.document(driver.job_id(line), end))
                advance(self._output.lines, self._total)

    async def _lines(self) -> AsyncIterator[Line]:
        """Those that have no answer yet."""
        skip = self._output.lines
        with self._path.open("rb") as file:
            for some in raw_lines(read_blocks(file)):
                for raw in some[skip:]:
                    yield self._line(raw)
                skip = max(0, skip - len(some))

    def _line(self, raw: RawLine) -> Line:
        fields = fields_of(raw)
        if not isinstance(fields, dict):
            return BareLine(raw, fields)
        if "body" in fields or "url" in fields:
            return OpenAILine(raw, fields, self._rules)
        return BareLine(raw, self._defaults | fields)

    async def _check_workers(self, client: AsyncClient) -> None:
        models = await client.models()
        if not models:
            raise ModelNotServed(
                f"no worker has served any model at {safe_url(client.settings.redis_url)}; start "
                "one with `llorch worker`, or correct the URL"
            )
        if not await client.workers():
            names = " or ".join(sorted(model.name for model in models))
            self._screen.note(
                f"no worker is running: the jobs wait until one of {names} starts", "yellow"
            )

    def _tell(self, error: QueueFull | ModelNotServed | BrokerUnavailable) -> None:
        if type(error) not in self._reported:
            self._reported.add(type(error))
            why = f"waiting for room: {error.message}" if isinstance(error, QueueFull) else error
            self._screen.note(str(why), "yellow")
