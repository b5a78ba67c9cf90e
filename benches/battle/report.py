"""The results as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benches.battle.battle import Outcome, Terms
from benches.battle.schedule import NETWORK
from llorch_worker.bench.instruments.provenance import Provenance, provenance

DEATHS = ("SIGKILL", "SIGTERM", "SIGQUIT")
PACKAGES = ("celery", "kombu", "redis")


def as_json(outcomes: Sequence[Outcome], terms: Terms) -> dict[str, Any]:
    return {
        "provenance": _origin().model_dump(mode="json"),
        "redis_server": outcomes[0].redis_version,
        "terms": asdict(terms),
        "battles": [
            asdict(outcome) | {"findings": outcome.findings.as_json()} for outcome in outcomes
        ],
    }


def print_table(outcomes: Sequence[Outcome], terms: Terms) -> None:
    console = Console()
    table = Table(title=f"{terms.minutes:g} minutes of battle, seed {terms.seed}")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.contestant, justify="right")
    for name, values in _rows(outcomes):
        table.add_row(name, *values)
    console.print(table)
    for line in (*_origin().lines(), f"  redis-server {outcomes[0].redis_version}"):
        console.print(line, soft_wrap=True)
    for outcome in outcomes:
        kept = "every promise kept" if outcome.findings.clean else "promises broken"
        console.print(f"{outcome.contestant}: {kept}")
        for kind, ends in sorted(outcome.findings.ends.items()):
            shown = ", ".join(f"{count} {state}" for state, count in sorted(ends.items()))
            console.print(f"  {kind}: {shown}")
        if outcome.findings.replies:
            console.print(f"  replies to commands: {outcome.findings.replies}")
        if outcome.unexpected_exits:
            console.print(f"  died unasked, with exit codes: {', '.join(outcome.unexpected_exits)}")
        for fault, named in outcome.findings.suspects.items():
            console.print(f"  {fault}: {', '.join(named)}", soft_wrap=True)


def _origin() -> Provenance:
    return provenance(
        device="cpu", seed=0, program=("python", "-m", "benches.battle"), measured_with=PACKAGES
    )


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    def row(name: str, value: Any) -> tuple[str, list[str]]:
        return name, [str(value(outcome)) for outcome in outcomes]

    return [
        row("jobs sent", lambda o: o.findings.jobs),
        row("tokens promised", lambda o: o.findings.tokens),
        row("kills", lambda o: sum(o.findings.kills.get(k, 0) for k in (*DEATHS, NETWORK))),
        *(row(f"  {k}", lambda o, k=k: o.findings.kills.get(k, 0)) for k in (*DEATHS, NETWORK)),
        row("jobs lost", lambda o: o.findings.lost),
        row("  of them nowhere in Redis", lambda o: [*o.lost_and_found.values()].count("nowhere")),
        row("jobs that ended otherwise than they must", lambda o: o.findings.failed),
        row("  of them innocent without attempts left", lambda o: o.findings.exhausted),
        row("jobs begun before they were due", lambda o: o.findings.early),
        row("bodies of chords and chains misdispatched", lambda o: o.findings.misdispatched),
        row("bodies of chords and chains sent twice", lambda o: o.findings.sent_twice),
        row("wrong replies to commands", lambda o: o.findings.wrong_replies),
        row("results unannounced", lambda o: o.findings.unannounced_results),
        row("results changed after they were visible", lambda o: o.findings.changed_results),
        row("wrong results", lambda o: o.findings.wrong_results),
        row("doubled stream tokens", lambda o: o.findings.doubled_tokens),
        row("missing stream tokens", lambda o: o.findings.missing_tokens),
        row(
            "wrong or disordered stream tokens",
            lambda o: o.findings.wrong_tokens + o.findings.disordered_tokens,
        ),
        row("streams with any fault", lambda o: o.findings.broken_streams),
        row("jobs taken over by another worker", lambda o: o.findings.taken_over),
        row("jobs run again from zero", lambda o: o.findings.run_again),
        row("wasted tokens", lambda o: o.findings.wasted_tokens),
        *(
            row(f"recovery, {kind}, p50 / p95 / max", lambda o, k=kind: _recovery(o, k))
            for kind in (*DEATHS, NETWORK, "SIGKILL, struck once", "all, struck once", "all")
        ),
        row("job latency p50 / p95 / max", lambda o: _spread(o.findings.latency_s)),
        row("worker start-up p50 / p95 / max", lambda o: _spread(o.start_up_s)),
        row("workers killed for not stopping in time", lambda o: o.escalated),
        row("workers killed by poison", lambda o: o.findings.kills.get("poison", 0)),
        row("dead letters retried", lambda o: o.findings.retried),
        row("workers that died unasked", lambda o: len(o.unexpected_exits)),
        row("wall time", lambda o: f"{o.wall_s:.0f} s"),
    ]


def _recovery(outcome: Outcome, kind: str) -> str:
    return _spread(outcome.findings.recovery_s.get(kind, {"count": 0}))


def _spread(times: dict[str, float]) -> str:
    if not times.get("count"):
        return "-"
    return f"{times['p50']:.2f} / {times['p95']:.2f} / {times['max']:.2f} s"
