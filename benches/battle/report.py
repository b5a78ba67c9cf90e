"""The document and the table of a battle."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from benches.battle.audit import Seen
from benches.battle.battle import Outcome
from benches.battle.fleet import Terms
from benches.battle.schedule import ENGINE, KINDS
from llorch_worker.bench.instruments.provenance import Figures
from llorch_worker.bench.tables import Cell, table, title

KILLS = (*KINDS, ENGINE, "poison")
RECOVERIES = (
    *KINDS,
    ENGINE,
    "SIGKILL, struck once",
    "all, struck once",
    "all, low, struck once",
    "all",
)


class BattleFigures(Figures):
    """The document of ``python -m benches.battle --json``."""

    terms: Terms
    battles: tuple[Outcome, ...]

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.terms.minutes:g} minutes of battle, seed {self.terms.seed}")
        names = [outcome.contestant for outcome in self.battles]
        columns = [dict(_figures(outcome)) for outcome in self.battles]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        yield table([("", ""), *((name, ",") for name in names)], rows)
        for outcome in self.battles:
            found = outcome.findings
            kept = "every promise kept" if outcome.clean else "promises broken"
            yield f"{outcome.contestant}: {kept}; redis-server {outcome.redis_version}"
            for kind, ends in sorted(found.ends.items()):
                yield f"  {kind}: {', '.join(f'{n} {state}' for state, n in sorted(ends.items()))}"
            if found.replies:
                yield f"  replies to commands: {found.replies}"
            if outcome.unexpected_exits:
                yield f"  died unasked, with exit codes: {', '.join(outcome.unexpected_exits)}"
            for fault, named in found.suspects.items():
                yield f"  {fault}: {', '.join(named)}"


def _figures(outcome: Outcome) -> Iterator[tuple[str, Cell]]:
    found = outcome.findings
    for what in Seen:
        yield what.value, found.counts[what]
    for kind in KILLS:
        yield f"killed by {kind}", found.kills.get(kind, 0)
    yield "workers killed for not stopping in time", outcome.escalated
    yield "workers that died unasked", len(outcome.unexpected_exits)
    for kind in RECOVERIES:
        yield f"recovery, {kind}, p50 / p95 / max", _spread(found.recovery_s.get(kind, {}))
    yield "job latency p50 / p95 / max", _spread(found.latency_s)
    yield "worker start-up p50 / p95 / max", _spread(outcome.start_up_s)
    yield "wall time, s", round(outcome.wall_s)


def _spread(times: dict[str, float]) -> str:
    if not times.get("count"):
        return "-"
    return f"{times['p50']:.2f} / {times['p95']:.2f} / {times['max']:.2f} s"
