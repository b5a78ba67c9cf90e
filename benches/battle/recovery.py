"""How long the jobs of struck workers paused."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benches.battle.ledger import POISON, Ledger
from llorch_worker.bench.instruments.percentiles import percentiles_ms

TERMINAL_EVENTS = ("finished", "failed", "cancelled")


def recoveries(ledger: Ledger) -> dict[str, dict[str, float]]:
    """How long the jobs of a struck worker paused, by kind of strike, and for all jobs that were
    struck once. Low jobs are apart: they also wait for more urgent ones.

    Measured from ``gone_s`` to the job's next tokens or its end, from any worker. Jobs that never
    continued are left out: they are lost.
    """
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    poison = {job.id for job in ledger.jobs if job.kind == POISON}
    low = {job.id for job in ledger.jobs if job.is_low}
    strikes = Counter(job_id for kill in ledger.kills for job_id in kill.held)
    for kill in ledger.kills:
        for job_id, place in kill.held.items():
            seen_s = _sign_of_life_s(ledger, job_id, place)
            if job_id in poison or seen_s is None:
                continue
            once = strikes[job_id] == 1 and not _struck(ledger, job_id, kill.gone_s, seen_s)
            for kind in (kill.kind, "all"):
                by_kind[kind].append(seen_s - kill.gone_s)
                if once:
                    what = "low, struck once" if job_id in low else "struck once"
                    by_kind[f"{kind}, {what}"].append(seen_s - kill.gone_s)
    return {kind: spread(times) for kind, times in by_kind.items()}


def _sign_of_life_s(ledger: Ledger, job_id: str, place: int) -> float | None:
    """When the job's first tokens or end from entry ``place`` on were seen."""
    for entry in ledger.entries[job_id][place:]:
        if read_object(entry.document).get("type") in ("tokens", *TERMINAL_EVENTS):
            return entry.seen_s
    return None


def _struck(ledger: Ledger, job_id: str, after_s: float, until_s: float) -> bool:
    """Whether a worker that claimed the job was struck in this time, before the job's stream showed
    the claim."""
    for result in ledger.results[job_id]:
        document = read_object(result.document)
        if document.get("status") != "STARTED":
            continue
        since_s = max(after_s, result.seen_s)
        worker = (document.get("result") or {}).get("hostname")
        if any(k.worker == worker and since_s < k.gone_s <= until_s for k in ledger.kills):
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
