"""How long the jobs of struck workers paused."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benches.battle.ledger import POISON, Entry, Ledger

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
                    if strikes[job_id] == 1 and _claims(ledger, job_id) <= 2:
                        kinds += [f"{kill.kind}, struck once", "all, struck once"]
                    for kind in kinds:
                        by_kind.setdefault(kind, []).append(pause_s)
                    break
    return {kind: spread(times) for kind, times in by_kind.items()}


def _claims(ledger: Ledger, job_id: str) -> int:
    """How often workers claimed the job. One may die before the job's stream shows its claim."""
    documents = (read_object(result.document) for result in ledger.results(job_id))
    return sum(document.get("status") == "STARTED" for document in documents)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile and maximum of ``times`` in seconds."""
    if not times:
        return {"count": 0}
    return {
        "count": len(times),
        "p50": round(statistics.median(times), 3),
        "p95": round(sorted(times)[math.ceil(0.95 * len(times)) - 1], 3),
        "max": round(max(times), 3),
    }


def read_object(document: str) -> dict[str, Any]:
    try:
        value = json.loads(document)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
