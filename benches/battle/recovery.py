"""How long the jobs of struck workers paused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benches.battle.ledger import POISON, Entry, Kill, Ledger
from llorch_worker.bench.instruments.percentiles import percentiles_ms

TERMINAL_EVENTS = ("finished", "failed", "cancelled")


def recoveries(ledger: Ledger) -> dict[str, dict[str, float]]:
    """How long the jobs of a struck worker paused, by kind of strike, and for all jobs that were
    struck once.

    Measured from ``gone_s`` to the job's next tokens or its end, from any worker. Jobs that never
    continued are left out: they are lost.
    """
    by_kind: dict[str, list[float]] = {}
    entries: dict[str, list[Entry]] = {}
    poison = {job.id for job in ledger.jobs() if job.kind == POISON}
    kills = list(ledger.kills())
    strikes = Counter(job_id for kill in kills for job_id in kill.held)
    for kill in kills:
        for job_id, place in kill.held.items():
            if job_id in poison:
                continue
            if job_id not in entries:
                entries[job_id] = ledger.entries(job_id)
            for entry in entries[job_id][place:]:
                if read_object(entry.document).get("type") in ("tokens", *TERMINAL_EVENTS):
                    pause_s = entry.seen_s - kill.gone_s
                    kinds = [kill.kind, "all"]
                    struck_again = _struck(ledger, job_id, kills, kill.gone_s, entry.seen_s)
                    if strikes[job_id] == 1 and not struck_again:
                        kinds += [f"{kill.kind}, struck once", "all, struck once"]
                    for kind in kinds:
                        by_kind.setdefault(kind, []).append(pause_s)
                    break
    return {kind: spread(times) for kind, times in by_kind.items()}


def _struck(
    ledger: Ledger, job_id: str, kills: Sequence[Kill], after_s: float, until_s: float
) -> bool:
    """Whether a worker that claimed the job was struck in this time, before the job's stream showed
    the claim."""
    for result in ledger.results(job_id):
        document = read_object(result.document)
        if document.get("status") != "STARTED":
            continue
        since_s = max(after_s, result.seen_s)
        worker = (document.get("result") or {}).get("hostname")
        for kill in kills:
            if kill.worker == worker and since_s < kill.gone_s <= until_s:
                return True
    return False


def spread(times: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile and maximum of ``times`` in seconds."""
    if not times:
        return {"count": 0}
    found = percentiles_ms(times)
    return {
        "count": found.samples,
        "p50": round(found.p50 / 1e3, 3),
        "p95": round(found.p95 / 1e3, 3),
        "max": round(max(times), 3),
    }


def read_object(document: str) -> dict[str, Any]:
    try:
        value = json.loads(document)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
