"""What each tenant used, by model and UTC day. Over HTTP a job's tenant is the name of its key.

The script that stores a job's one end counts it too (``lua/parts/usage.lua``), so that no death of
a worker or a gateway loses or doubles it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from typing import Any

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.contract import Cancelled, JobResult, LlorchError, Timings, Usage

MOST_DAYS = 3660
SHOWN_DAYS = 30
_EPOCH = date(1970, 1, 1)
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,100}")


def _count(name: str) -> Any:
    """A field that Redis counts as ``name``."""
    return field(default=0, metadata={"name": name})


@dataclass(frozen=True)
class UsageRow:
    """What the jobs of a tenant used that a worker ended on one day. A waiting job that is
    cancelled counts nowhere, one that is cancelled while it runs with its tokens so far."""

    day: date
    tenant: str
    """Over HTTP the key's name; "" for jobs without one."""
    model: str
    jobs: int = _count("jobs")
    """Those that ended with a result, or were cancelled while they ran."""
    failed: int = _count("failed")
    prompt_tokens: int = _count("prompt")
    cached_tokens: int = _count("cached")
    """How many tokens of the prompts were found in the KV cache."""
    completion_tokens: int = _count("completion")
    worker_ms: int = _count("ms")
    """From the first step to the end, of the attempts that ended the jobs, in all."""


_COUNTS = {each.metadata["name"]: each.name for each in fields(UsageRow) if each.metadata}


def written(
    tenant: object,
    model: str,
    end: JobResult | LlorchError,
    spent: tuple[Usage, Timings] | None,
    keep_s: int,
) -> str:
    """What ``lua/parts/usage.lua`` gets. ``spent``: what a job used that ended without a result;
    ``keep_s``: for the day's counts, 0 for none."""
    amounts = {"failed": 1}
    if isinstance(end, JobResult):
        spent = end.usage, end.timings
    if spent is not None:
        used, took = spent
        amounts = {
            "jobs": 1,
            "prompt": used.prompt,
            "cached": used.cached,
            "completion": used.completion,
            "ms": round(took.prefill_ms + took.decode_ms),
        }
    elif isinstance(end, Cancelled):
        return ""
    who = tenant if isinstance(tenant, str) and _TENANT.fullmatch(tenant) else ""
    counted = " ".join(f"{what}={amount}" for what, amount in amounts.items() if amount > 0)
    return f"{who}/{model} {keep_s} {counted}"


def days_of(since: date | None, until: date | None) -> tuple[date, date]:
    """The first and the last day that are asked for; by default :data:`SHOWN_DAYS` up to today.
    Neither is before the epoch, from which the counts number their days."""
    last = max(until or today(), _EPOCH)
    first = since or last - timedelta(SHOWN_DAYS - 1)
    return max(first, _EPOCH), last


def read(client: Redis, since: date, until: date, tenant: str | None = None) -> list[UsageRow]:
    """Every row of these days, the last included, at most the last :data:`MOST_DAYS`; only those of
    ``tenant``, if it is given."""
    since = max(since, until - timedelta(MOST_DAYS - 1))
    days = [since + timedelta(n) for n in range((until - since).days + 1)]
    with client.pipeline(transaction=False) as pipe:
        for day in days:
            pipe.hgetall(keys.usage((day - _EPOCH).days))
        return [
            row
            for day, counts in zip(days, pipe.execute(), strict=True)
            for row in _rows(day, counts)
            if tenant in (None, row.tenant)
        ]


def today() -> date:
    """In UTC, by this machine's clock."""
    return datetime.now(UTC).date()


def _rows(day: date, counts: Mapping[str, str]) -> list[UsageRow]:
    found: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for name, amount in counts.items():
        tenant, model, what = name.split("/")
        if what in _COUNTS:  # a newer worker may count more
            found[tenant, model][_COUNTS[what]] = int(amount)
    return [UsageRow(day, *whose, **found[whose]) for whose in sorted(found)]
