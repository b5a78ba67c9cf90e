"""One contestant under load and repeated strikes, and the audit of its ledger."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benches.battle import other_app
from benches.battle.audit import Findings, audit
from benches.battle.contestant import OURS, Contestant
from benches.battle.fleet import Fleet
from benches.battle.ledger import Ledger
from benches.battle.load import Producer, load
from benches.battle.meddler import Meddler
from benches.battle.mixture import mixed
from benches.battle.recovery import spread
from benches.battle.schedule import Order, orders, strikes
from benches.battle.watch import ResultWatcher, StreamReader
from llorch_worker.broker import keys
from tests.services import own_redis, running_worker

TICK_S = 0.02
START_TIMEOUT_S = 120.0
QUIET_S = 30.0
"""A battle ends when nothing has changed for this long: twice the lease plus sweep, and twice the
control's visibility timeout."""
PATIENCE_IN_QUIETS = 2
"""If jobs have not ended, the quiet must last this many times longer before they count as lost."""
LONGEST_SETTLING_S = 600.0
REPORT_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Terms:
    """The parameters of a battle."""

    minutes: float
    kills: int
    workers: int
    max_sequences: int
    step_ms: float
    rate_per_s: float
    seed: int
    quiet_s: float = QUIET_S
    mixed: bool = False
    """Whether ours also gets countdowns, chords, chains, cancels, poison and control commands."""


@dataclass(frozen=True)
class Outcome:
    """The result of a battle."""

    contestant: str
    findings: Findings
    lost_and_found: dict[str, str]
    """Where each lost job was found at the end: a Redis key, or nowhere."""
    wall_s: float
    start_up_s: dict[str, float]
    escalated: int
    unexpected_exits: tuple[str, ...]
    redis_version: str


def fight(contestant: Contestant, terms: Terms, folder: Path) -> Outcome:
    """Runs one battle; ledger and logs stay in ``folder``."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(own_redis(append_only=True))
        client = stack.enter_context(redis.Redis.from_url(server.url))
        ledger = Ledger(folder / "ledger.sqlite")
        stack.callback(ledger.close)
        reader, watcher = StreamReader(server.url, ledger), ResultWatcher(server.url, ledger)
        for each in (reader, watcher):
            each.start()
            stack.callback(each.stop)
        fleet = Fleet(
            contestant, terms.workers,
            redis_port=server.port, folder=folder, ledger=ledger, reader=reader,
        )  # fmt: skip
        stack.callback(fleet.kill)
        _muster(fleet)
        meddler = None
        jobs = orders(terms.seed, terms.rate_per_s)
        parcels: Iterator[tuple[Order, ...]] = ((order,) for order in jobs)
        if terms.mixed and contestant.name == OURS:
            options = {"app": other_app.__name__, "options": ("-P", "solo", "-Q", other_app.QUEUE)}
            stack.enter_context(
                running_worker(server.url, folder, name=other_app.NAME, fresh=True, **options)
            )
            meddler = Meddler(server.url, terms.seed, ledger, reader)
            meddler.start()
            stack.callback(meddler.stop)
            parcels = mixed(jobs, terms.seed)
        with load(Producer(server.url, client, ledger, reader, meddler), parcels):
            _storm(fleet, contestant, terms, ledger, watcher)
        fleet.heal()
        if meddler is not None:
            meddler.calm()
        _settle(fleet, terms, ledger, watcher)
        fleet.stop()
        watcher.stop()
        reader.compare()
        for run in client.lrange(other_app.RUNS, 0, -1):
            ledger.ran(run.decode())
        findings = audit(ledger, unannounced=watcher.compare())
        lost = _whereabouts(client, findings.lost_ids)
        return Outcome(
            contestant=contestant.name,
            findings=findings,
            lost_and_found=lost,
            wall_s=time.monotonic() - began_s,
            start_up_s=spread(fleet.start_up_s),
            escalated=fleet.escalated_total,
            unexpected_exits=tuple(fleet.unexpected_exits),
            redis_version=str(client.info("server")["redis_version"]),
        )


def _muster(fleet: Fleet) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not fleet.all_ready:
        fleet.tick()
        if fleet.unexpected_exits or time.monotonic() > give_up_s:
            raise RuntimeError(f"the workers do not start: {fleet.unexpected_exits}")
        time.sleep(TICK_S)


def _storm(
    fleet: Fleet, contestant: Contestant, terms: Terms, ledger: Ledger, watcher: ResultWatcher
) -> None:
    """Performs each strike on time, or as soon as there is a worker to strike."""
    total_s = terms.minutes * 60
    plan = strikes(terms.seed, terms.kills, total_s)
    began_s = told_s = time.monotonic()
    done = 0
    while done < len(plan) or time.monotonic() - began_s < total_s:
        fleet.tick()
        now_s = time.monotonic()
        if done < len(plan) and now_s - began_s >= plan[done].at_s and fleet.strike(plan[done]):
            done += 1
        if now_s - told_s >= REPORT_INTERVAL_S:
            told_s = now_s
            _tell(
                f"{contestant.name}: {now_s - began_s:.0f} s, {done} strikes, "
                f"{watcher.ended_count} of {len(ledger.jobs())} jobs ended"
            )
        time.sleep(TICK_S)


def _settle(fleet: Fleet, terms: Terms, ledger: Ledger, watcher: ResultWatcher) -> None:
    """Waits, after the last strike, until nothing changes any more."""
    began_s = time.monotonic()
    sent = len(ledger.jobs())
    while time.monotonic() - began_s < LONGEST_SETTLING_S:
        fleet.tick()
        patience = 1 if watcher.ended_count == sent else PATIENCE_IN_QUIETS
        if time.monotonic() - max(ledger.last_activity_s, began_s) > patience * terms.quiet_s:
            break
        time.sleep(TICK_S)
    _tell(f"{watcher.ended_count} of {sent} jobs ended")


def _whereabouts(client: Any, job_ids: list[str]) -> dict[str, str]:
    """For each of these jobs, a Redis key other than its own that still contains it."""
    found = dict.fromkeys(job_ids, "nowhere")
    if not job_ids:
        return found
    own = (keys.events("").encode().partition(b"::")[0], keys.result("").encode())
    for key in client.scan_iter(count=1000):
        content = b"" if key.startswith(own) else _content(client, key)
        for job_id in job_ids:
            if job_id.encode() in content:
                found[job_id] = key.decode()
    return found


def _content(client: Any, key: bytes) -> bytes:
    match client.type(key):
        case b"list":
            parts = client.lrange(key, 0, -1)
        case b"zset":
            parts = client.zrange(key, 0, -1)
        case b"hash":
            parts = [part for pair in client.hgetall(key).items() for part in pair]
        case _:
            parts = []
    return b" ".join(parts)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
