"""The harness itself, on real processes: peace breaks no promise, and nothing stays behind."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil
import pytest

from benches.battle import mixture
from benches.battle.audit import Seen
from benches.battle.battle import fight
from benches.battle.fleet import Contestant, Terms, ours, stock
from benches.battle.ledger import POISON, Job, Ledger
from benches.battle.mixture import mixed
from benches.battle.schedule import orders, strikes
from benches.battle.watch import ResultWatcher, StreamReader
from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from tests.services import own_redis, wait_until
from tests.store import add_entry, lose_stream, store_result

PEACE = Terms(
    minutes=0.05, kills=0, workers=1, max_sequences=2, step_ms=2.0, rate_per_s=3.0, quiet_s=1.0
)


def test_the_seed_decides_everything() -> None:
    assert strikes(1, 50, 60) == strikes(1, 50, 60) != strikes(2, 50, 60)
    first, again, other = (list(islice(mixed(orders(n, 4.0), n), 50)) for n in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("contestant", [ours(PEACE), stock(PEACE)])
def test_a_battle_without_a_kill_breaks_no_promise(contestant: Contestant, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    outcome = fight(contestant, PEACE, tmp_path)
    assert outcome.findings.clean, outcome
    assert outcome.findings.counts[Seen.JOBS] > 0
    assert outcome.findings.counts[Seen.TAKEN_OVER] == 0
    assert outcome.unexpected_exits == ()
    assert (tmp_path / "ledger.json").stat().st_size > 0
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_mixed_battle_without_a_kill_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "LONGEST_COUNTDOWN_S", 2.0)
    monkeypatch.setattr(mixture, "LATEST_CANCEL_S", 1.0)
    monkeypatch.setattr(mixture, "SHARES", dict.fromkeys(mixture.SHARES, 1.0) | {"poison": 0.0})
    terms = replace(PEACE, minutes=0.1, max_sequences=4, rate_per_s=4.0, quiet_s=2.0, mixed=True)
    outcome = fight(ours(terms), terms, tmp_path)
    found = outcome.findings
    assert found.clean, outcome
    assert outcome.unexpected_exits == ()
    assert {"ping"} < found.replies.keys()
    assert {"REVOKED"} <= found.ends["cancelled"].keys() | found.ends["cancelled, countdown"].keys()
    assert {"plain", "plain, countdown", "ours, after our jobs"} < found.ends.keys()
    assert "SUCCESS" in found.ends["stock, after our jobs"]


def test_a_stream_is_read_on_after_the_retry_of_its_dead_letter() -> None:
    with own_redis() as server, connect(server.url) as client:
        ledger = Ledger()
        reader = StreamReader(server.url, ledger)
        ledger.jobs.append(Job("job", 1, 2, kind=POISON))
        reader.follow("job", listens=False)

        def write(number: int, kind: str) -> None:
            add_entry(client, "job", json.dumps({"type": kind}), f"{number}-0")

        def retry() -> bool:
            """As ``retry.lua`` does it, without the end."""
            lose_stream(client, "job")
            write(1, "started")
            return True

        write(1, "started")
        write(2, "failed")
        assert not reader.retried("job", lambda: False)
        assert reader.retried("job", retry)
        write(2, "started")
        write(3, "failed")
        reader.compare()
        kinds = [json.loads(entry.document)["type"] for entry in ledger.entries["job"]]
        assert kinds == ["started", "failed", "started", "failed"]
        assert (ledger.retries["job"], ledger.withdrawn) == (1, [])


def test_the_readers_see_every_entry_and_every_result() -> None:
    with own_redis() as server, connect(server.url) as client:
        ledger = Ledger()
        reader, watcher = StreamReader(server.url, ledger), ResultWatcher(server.url, ledger)
        watcher.start()
        ledger.jobs.append(Job("job", 1, 2))
        reader.follow("job", listens=False)
        first = add_entry(client, "job", '{"type":"started","worker":"a"}')
        assert reader.held_by("a") == {"job": 1}
        assert reader.held_by("b") == {}
        add_entry(client, "job", '{"type":"finished"}')
        assert reader.held_by("a") == {}

        for document in ('{"status":"STARTED"}', '{"status":"SUCCESS"}', '{"status":"FAILURE"}'):
            with client.pipeline() as pipe:
                store_result(pipe, "job", document, publish=True)
                pipe.execute()
        wait_until(lambda: len(ledger.results["job"]) == 3)
        assert watcher.compare() == []

        # What nobody announced, and what somebody took away, is found at the end.
        store_result(client, "job", '{"status":"SUCCESS","late":1}')
        client.xdel(keys.events("job"), first)
        add_entry(client, "job", '{"type":"finished","again":1}')
        wait_until(lambda: watcher.compare() == ["job"])
        reader.compare()
        assert len(ledger.withdrawn) == 1
        assert len(ledger.entries["job"]) == 3
        watcher.stop()
