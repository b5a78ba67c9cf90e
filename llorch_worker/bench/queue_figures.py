"""The document and the tables of ``llorch bench queue``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Self

from rich.console import RenderableType

from llorch_worker.bench.instruments.client_load import Throughput
from llorch_worker.bench.instruments.percentiles import Percentiles, spread_of
from llorch_worker.bench.instruments.provenance import Figures, Frozen
from llorch_worker.bench.tables import Cell, median_of, table, title
from llorch_worker.contract.quantities import counted


class Way(Frozen):
    """One way of running a load; medians over the passes."""

    jobs_per_s: float
    tokens_per_s: float
    """Generated tokens."""
    spread: float | None
    """Largest minus smallest ``tokens_per_s``, as a share of the median; None for one pass."""

    @classmethod
    def of(cls, passes: Sequence[Throughput]) -> Self:
        rates = [each.tokens_per_s for each in passes]
        jobs_per_s = median(each.jobs_per_s for each in passes)
        return cls(jobs_per_s=jobs_per_s, tokens_per_s=median(rates), spread=spread_of(rates))


class LoadRow(Frozen):
    """One number of jobs, all submitted at once."""

    jobs: int
    straight: Way
    queued: Way
    share: float
    """Tokens a second through Redis, as a share of the engine's."""


class SingleJobs(Frozen):
    """Jobs one at a time: from submit to result, less the engine's own time on the job."""

    straight_ms: Percentiles
    queued_ms: Percentiles
    added_p50_ms: float
    added_p95_ms: float


class QueueFigures(Figures):
    """The document of ``llorch bench queue --json``."""

    model: Path
    dtype: str
    concurrency: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    passes: int
    rows: tuple[LoadRow, ...]
    single: SingleJobs

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model} as {self.dtype}, straight and through Redis")
        prompts, new = self.prompt_tokens, self.new_tokens
        yield (
            f"  prompts of {prompts[0]} to {prompts[1]} tokens, {new[0]} to {new[1]} new ones, "
            f"{counted(self.concurrency, 'sequence')} at once; {median_of(self.passes)}\n"
        )
        rows: list[tuple[Cell, ...]] = []
        for row in self.rows:
            straight, queued = row.straight, row.queued
            rates = straight.jobs_per_s, straight.tokens_per_s, straight.spread
            rows.append((row.jobs, "straight", *rates, None))
            rates = queued.jobs_per_s, queued.tokens_per_s, queued.spread
            rows.append((None, "queued", *rates, row.share))
        yield table(
            [
                *(("jobs", ","), ("", ""), ("jobs/s", ".2f"), ("tokens/s", ",.1f")),
                *(("spread", ".1%"), ("share", ".1%")),
            ],
            rows,
            words=2,
        )
        yield "  share: tokens that arrive through Redis, of the engine's; at least 97% is expected"
        single = self.single
        yield ""
        yield table(
            [("one job at a time", ""), ("p50, ms", ".2f"), ("p95", ".2f")],
            [
                ("straight", single.straight_ms.p50, single.straight_ms.p95),
                ("queued", single.queued_ms.p50, single.queued_ms.p95),
                ("the queue adds", single.added_p50_ms, single.added_p95_ms),
            ],
        )
        yield (
            f"  submit to result less the engine's own time, {single.queued_ms.samples} jobs each; "
            "at most 5 ms added\n  at p50 is expected"
        )
