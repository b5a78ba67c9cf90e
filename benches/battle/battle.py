"""One contestant under load and repeated strikes, and the audit of its ledger."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import redis

from benches.battle import other_app
from benches.battle.audit import Findings, audit
from benches.battle.fleet import OURS, Contestant, Fleet, Terms
from benches.battle.ledger import Ledger
from benches.battle.load import Producer
from benches.battle.meddler import Meddler
from benches.battle.mixture import mixed
from benches.battle.recovery import spread
from benches.battle.schedule import KINDS_OF_TEN, MIXED_OF_TEN, Order, orders, strikes
from benches.battle.watch import ResultWatcher, StreamReader
from tests.services import own_redis, running_worker

TICK_S = 0.02
START_TIMEOUT_S = 120.0
PATIENCE_IN_QUIETS = 2
"""If jobs have not ended, the quiet must last this many times longer before they count as lost."""
LONGEST_SETTLING_S = 600.0
REPORT_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """The result of a battle."""

    contestant: str
    clean: bool
    """Whether every promise was kept, and no worker died that was not struck."""
    findings: Findings
    wall_s: float
    start_up_s: dict[str, float]
    escalated: int
    unexpected_exits: tuple[str, ...]
    redis_version: str


def fight(contestant: Contestant, terms: Terms, folder: Path) -> Outcome:
    """Runs one battle; ledger and logs stay in ``folder``."""
    began_s = time.monotonic()
    # The report has standard output; workers of tests print their logs there.
    with redirect_stdout(sys.stderr), ExitStack() as stack:
        server = stack.enter_context(own_redis(append_only=True))
        client = stack.enter_context(redis.Redis.from_url(server.url))
        ledger = Ledger()
        stack.callback(ledger.save, folder / "ledger.json")
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
        producer = Producer(
            server.url, parcels, client=client, ledger=ledger, reader=reader, meddler=meddler
        )
        producer.start()
        try:
            _storm(fleet, contestant, terms, ledger, watcher)
        finally:
            producer.stop()
        fleet.heal()
        if meddler is not None:
            meddler.calm()
        _settle(fleet, terms, ledger, watcher)
        fleet.stop()
        watcher.stop()
        reader.compare()
        for run in client.lrange(other_app.RUNS, 0, -1):
            ledger.runs[run.decode()] += 1
        findings = audit(ledger, unannounced=watcher.compare())
        return Outcome(
            contestant=contestant.name,
            clean=findings.clean and not fleet.unexpected_exits,
            findings=findings,
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
    kinds = MIXED_OF_TEN if terms.mixed else KINDS_OF_TEN
    plan = strikes(terms.seed, terms.kills, total_s, kinds)
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
                f"{watcher.ended_count} of {len(ledger.jobs)} jobs ended"
            )
        time.sleep(TICK_S)


def _settle(fleet: Fleet, terms: Terms, ledger: Ledger, watcher: ResultWatcher) -> None:
    """Waits, after the last strike, until nothing changes any more."""
    began_s = time.monotonic()
    sent = len(ledger.jobs)
    while time.monotonic() - began_s < LONGEST_SETTLING_S:
        fleet.tick()
        patience = 1 if watcher.ended_count == sent else PATIENCE_IN_QUIETS
        if time.monotonic() - max(ledger.last_activity_s, began_s) > patience * terms.quiet_s:
            break
        time.sleep(TICK_S)
    _tell(f"{watcher.ended_count} of {sent} jobs ended")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
