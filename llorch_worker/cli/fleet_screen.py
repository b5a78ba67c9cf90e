"""The fleet on a full screen: what matters above, and as many workers as fit below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from llorch_worker.broker.connections.url import safe_url
from llorch_worker.cli import fleet_charts
from llorch_worker.cli.fleet_tables import (
    RECENT,
    WORK,
    WORKERS,
    jobs_table,
    loads_table,
    models_table,
    notices,
    silence,
    summary,
    workers_table,
)
from llorch_worker.cli.terminal.live_screen import LiveScreen
from llorch_worker.contract import printable
from llorch_worker.contract.quantities import counted, human_time

if TYPE_CHECKING:
    from rich.console import Console

    from llorch_worker.broker.figures.fleet import ModelLoad
    from llorch_worker.broker.figures.listed_jobs import Listing
    from llorch_worker.broker.fleet.registry import WorkerCard
    from llorch_worker.cli.fleet_reading import FleetReader, Reading

READING_LATE_S = 2.0
"""A reading that is overdue by this much has its age on the screen."""
FOOT_LINES = 1
JOBS_AROUND = 3
"""Around the rows of jobs: the head, how many there are, and an empty line."""
SHORTEST_HISTORY = 8
TALLEST_HISTORY = 18
FEWEST_LINES_OF_ALL = 22
"""On less room, below what stands on top, there are workers alone."""
TABLE_HEAD_LINES = 1
FEWEST_LINES = 3
"""So many notices and models are shown on any screen."""
LINES_A_NOTICE = 6
LINES_A_MODEL = 8
"""A screen of 24 lines has room for 4 notices and 3 models, each on a line of two tables."""

Head = Callable[["Console", "Reading", int], Iterable[RenderableType]]
"""Makes what stands above the workers on a screen with this many lines."""

ORDERS: tuple[tuple[str, Callable[[WorkerCard], float | str]], ...] = (
    ("load", lambda worker: -worker.load),
    ("tokens/s", lambda worker: -worker.tokens_per_s),
    ("KV used", lambda worker: -(worker.kv_used or 0)),
    ("last seen", lambda worker: worker.last_seen),
    ("name", lambda worker: worker.hostname),
)


class FleetScreen:
    """Shows the readings of ``reader`` until somebody quits. Keys: q quits, s sorts."""

    def __init__(
        self, console: Console, reader: FleetReader, url: str, title: str, head: Head
    ) -> None:
        self._console = console
        self._reader = reader
        self._title = f"{title}  {safe_url(url)}"
        self._head = head
        self._order = 0
        self._interval_s = 0.0

    def run(self, interval_s: float) -> None:
        self._interval_s = interval_s
        live = LiveScreen(self._console, self._draw, self._on_key)
        self._reader.start(interval_s, live.redraw)
        live.run()

    def _on_key(self, key: str) -> bool:
        if key == "s":
            self._order = (self._order + 1) % len(ORDERS)
        return key != "q"

    def _draw(self) -> RenderableType:
        if self._reader.defect is not None:
            raise self._reader.defect
        reading, lines = self._reader.last, self._console.height
        top = Group(self._banner(reading), *self._head(self._console, reading, lines), "")
        room = lines - len(self._console.render_lines(top)) - TABLE_HEAD_LINES - FOOT_LINES
        between, room = self._between(reading, room)
        order, key = ORDERS[self._order]
        workers = sorted(reading.fleet.workers, key=key)
        shown = workers if len(workers) <= room else workers[: max(0, room - 1)]
        hidden = workers[len(shown) :]
        rest = _rest(hidden) if hidden else ""
        body = Group(top, *between, workers_table(shown, narrow=True), rest)
        foot = Text(f"q quit   s sort: {order}", "dim")
        screen = Layout()
        screen.split_column(Layout(body), Layout(foot, size=FOOT_LINES))
        return screen

    def _between(self, reading: Reading, room: int) -> tuple[list[RenderableType], int]:
        """The history and the jobs, as far as there is room; and the lines that workers get.

        Workers get half of what the history leaves, jobs the rest, each more if the other needs
        less. What is left makes the history taller.
        """
        if reading.jobs is None or room < FEWEST_LINES_OF_ALL:
            return [], room
        jobs, workers = reading.jobs.jobs, len(reading.fleet.workers)
        left = room - JOBS_AROUND - SHORTEST_HISTORY - 1
        for_workers = max(left // 2, left - len(jobs))
        for_jobs = left - min(for_workers, workers)
        shown = jobs[: max(0, for_jobs)]
        spare = left - len(shown) - min(for_workers, workers)
        lines = SHORTEST_HISTORY + max(0, min(spare, TALLEST_HISTORY - SHORTEST_HISTORY))
        history = fleet_charts.charts(
            reading.history, reading.at_s, self._console.width, lines - lines % fleet_charts.ROWS
        )
        listed = Text(_jobs_line(reading.jobs, len(shown)), "dim", no_wrap=True)
        return [history, "", jobs_table(shown), listed, ""], room - (
            lines - lines % fleet_charts.ROWS + 1 + JOBS_AROUND + len(shown)
        )

    def _banner(self, reading: Reading) -> RenderableType:
        title = Text(self._title, "bold", no_wrap=True, overflow="ellipsis")
        title.append(f"  {time.strftime('%H:%M:%S')}", "not bold dim")
        age_s = time.time() - reading.at_s
        late = age_s > self._interval_s + READING_LATE_S
        if self._reader.away is None and not late:
            return title
        # Of a Redis that does not even refuse, the age alone shows it.
        why = printable(f"{self._reader.away or 'Redis does not reply'}")
        return Group(title, Text(f"{why}. Trying again; below is {human_time(age_s)} old.", "red"))


def status_head(_console: Console, reading: Reading, lines: int) -> Iterable[RenderableType]:
    """What ``llorch status`` shows beside the workers."""
    yield from _few_notices(reading, lines)
    yield ""
    models, others = _some_models(reading.fleet.models, lines)
    yield models_table(models)
    yield from others


def top_head(console: Console, reading: Reading, lines: int) -> Iterable[RenderableType]:
    """What ``llorch top`` shows above the workers."""
    fleet = reading.fleet
    yield summary(fleet)
    yield from _few_notices(reading, lines)
    models, others = _some_models(fleet.models, lines)
    yield ""
    whole = loads_table(models, (*WORKERS, *WORK, *RECENT))
    if _width(console, whole) <= console.width:
        yield whole
    else:
        yield loads_table(models, WORK)
        yield ""
        yield loads_table(models, RECENT)
    yield from others


def _few_notices(reading: Reading, lines: int) -> Iterable[Text]:
    found = [*silence(reading.fleet.workers), *notices(reading)]
    most = max(FEWEST_LINES, lines // LINES_A_NOTICE)
    for notice in found[:most]:
        notice.no_wrap, notice.overflow = True, "ellipsis"
        yield notice
    if len(found) > most:
        yield Text(f"and {len(found) - most} more: see llorch status", "yellow")


def _some_models(models: Sequence[ModelLoad], lines: int) -> tuple[Sequence[ModelLoad], list[Text]]:
    """Those with the most to do if there are too many, and how many others there are."""
    most = max(FEWEST_LINES, lines // LINES_A_MODEL)
    if len(models) <= most:
        return models, []
    busiest = sorted(models, key=lambda load: (-load.waiting, -load.running))[:most]
    return busiest, [Text(f"and {counted(len(models) - most, 'model')} with less to do", "dim")]


def _jobs_line(found: Listing, shown: int) -> str:
    later = f", {found.scheduled:,} scheduled" if found.scheduled else ""
    return (
        f"{counted(found.running, 'job')} running, {found.waiting:,} waiting{later}; "
        f"the first {shown:,} are shown"
    )


def _rest(workers: list[WorkerCard]) -> Text:
    running = sum(worker.running for worker in workers)
    preempting = sum(worker.waiting for worker in workers)
    more = f", {preempting:,} preempting" if preempting else ""
    return Text(f"and {counted(len(workers), 'more worker')}: {running:,} running{more}", "dim")


def _width(console: Console, table: RenderableType) -> int:
    """The columns that ``table`` would take if there were any number of them."""
    return console.measure(table, options=console.options.update_width(10_000)).maximum
