"""The harness itself, on real processes: peace breaks no promise, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benches.battle.battle import Terms, fight
from benches.battle.contestant import Contestant, ours, stock
from benches.battle.ledger import Job, Ledger
from benches.battle.watch import ResultWatcher, StreamReader
from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from tests.services import own_redis, wait_until

STEP_MS = 2.0


@pytest.mark.parametrize("contestant", [ours(2, STEP_MS), stock(2, STEP_MS, "threads")])
def test_a_battle_without_a_kill_breaks_no_promise(contestant: Contestant, tmp_path: Path) -> None:
    terms = Terms(
        minutes=0.05, kills=0, workers=1, max_sequences=2, step_ms=STEP_MS,
        rate_per_s=3.0, seed=1, quiet_s=1.0,
    )  # fmt: skip
    before = set(psutil.Process().children(recursive=True))
    outcome = fight(contestant, terms, tmp_path)
    assert outcome.findings.clean, outcome
    assert outcome.findings.jobs > 0
    assert outcome.findings.taken_over == 0
    assert outcome.unexpected_exits == ()
    assert (tmp_path / "ledger.sqlite").stat().st_size > 0
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_readers_see_every_entry_and_every_result() -> None:
    with own_redis() as server, connect(server.url) as client:
        ledger = Ledger()
        reader, watcher = StreamReader(server.url, ledger), ResultWatcher(server.url, ledger)
        watcher.start()
        ledger.sent(Job("job", 1, 2))
        reader.follow("job")
        first = client.xadd(keys.events("job"), {"event": '{"type":"started","worker":"a"}'})
        assert reader.held_by("a") == {"job": 1}
        assert reader.held_by("b") == {}
        client.xadd(keys.events("job"), {"event": '{"type":"finished"}'})
        assert reader.held_by("a") == {}

        for document in ('{"status":"STARTED"}', '{"status":"SUCCESS"}', '{"status":"FAILURE"}'):
            with client.pipeline() as pipe:
                pipe.set(keys.result("job"), document)
                pipe.publish(keys.result("job"), document)
                pipe.execute()
        wait_until(lambda: len(ledger.results("job")) == 3)
        assert watcher.compare() == []

        # What nobody announced, and what somebody took away, is found at the end.
        client.set(keys.result("job"), '{"status":"SUCCESS","late":1}')
        client.xdel(keys.events("job"), first)
        client.xadd(keys.events("job"), {"event": '{"type":"finished","again":1}'})
        wait_until(lambda: watcher.compare() == ["job"])
        reader.compare()
        assert ledger.withdrawn_count() == 1
        assert len(ledger.entries("job")) == 3
        watcher.stop()
