"""`llorch top` and `llorch status --watch`, in a terminal and in scripts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import redis
from rich.console import Console

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.figures.history import Point
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.queues import place_of
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.cli.fleet_charts import charts
from llorch_worker.cli.terminal.live_screen import LiveScreen
from llorch_worker.client import Client
from tests.broker.steps import push
from tests.cli.command import Served, Started, environment, run
from tests.cli.pseudo_terminal import FIRST_SCREEN, SECOND_SCREEN, Opener, PseudoTerminal
from tests.services import RedisServer, own_redis, wait_until

QUICK = ("--interval", "0.2")
MANY = 300


@pytest.fixture
def terminal() -> Iterator[Opener]:
    with ExitStack() as opened:

        def open_terminal(*arguments: str, **options: object) -> PseudoTerminal:
            return opened.enter_context(closing(PseudoTerminal(*arguments, **options)))  # type: ignore[arg-type]

        yield open_terminal


@pytest.fixture(scope="module")
def fleet() -> Iterator[RedisServer]:
    """A Redis that knows of hundreds of workers; two are busy, and one has long been silent."""
    with own_redis(append_only=True) as server:
        with connect(server.url) as store:
            for number in range(MANY):
                announce(store, number)
        yield server


def announce(store: redis.Redis, number: int) -> None:
    # They stay listed, and all but one are never silent, however long the tests take.
    silent_s = 12 if number == 250 else -3600
    card = WorkerCard(
        hostname=f"gpu{number % 8}@node-{number:03d}",
        pid=os.getpid(),
        model="toy",
        max_context=4096,
        max_sequences=16,
        device=f"gpu{number % 8}",
        started_at=0,
        last_seen=time.time() - silent_s,
        engine={
            "running": {77: 16, 88: 9}.get(number, 1),
            "waiting": 2 if number == 77 else 0,
            "tokens_per_s": 500.0 if number == 88 else 10.0,
            "kv_blocks_total": 100,
            "kv_blocks_free": 60,
        },
        recent=RecentJobs(ended=4, failed=number == 3, e2e_ms={40: 4}, first_token_ms={28: 4}),
    )
    registry.announce(store, card)
    store.persist(keys.worker(place_of(card.model, card.hostname)))


def test_top_shows_what_a_worker_does_and_follows_the_terminals_size(
    served: Served, terminal: Opener
) -> None:
    top = terminal("top", "--redis", served.redis_url, *QUICK, columns=80, lines=24)
    with Client(served.redis_url) as client:
        client.submit(model=served.model, prompt="Once upon a time", max_tokens=20).result(60)
    # Two tables of models fit side by side only where the terminal is wide.
    shown = top.wait_for("first token p50/p95", " ms / ", "llorch top", "q quit")
    assert re.search(rf"^{served.model} +0/16 +0 +0 +0 +0\.00$", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    top.resize(200, 30)
    wide = r"^model +workers +running +high +normal +low +saturation +tokens/s .*whole job p50/p95$"

    def is_wide() -> bool:
        screen = top.screen()
        last = screen.split("\n")[29]
        return last.startswith("q quit") and bool(re.search(wide, screen, re.MULTILINE))

    wait_until(is_wide, what="one table on 30 lines")
    top.press("q")
    assert top.ended() == 0


def test_of_hundreds_of_workers_the_most_loaded_are_shown_and_the_rest_summed_up(
    fleet: RedisServer, terminal: Opener
) -> None:
    top = terminal(
        "top", "--redis", fleet.url, *QUICK, columns=80, lines=24, NO_COLOR="1"
    )  # fmt: skip
    shown = top.wait_for("300 workers  323 of 4,800 running, 2 preempting", "q quit").splitlines()
    assert len(shown) == 24
    first = next(number for number, line in enumerate(shown) if line.startswith("worker ")) + 1
    assert re.match(r"gpu5@node-077 +toy +16/16 \+2 +10 +40% +-$", shown[first])
    assert shown[first + 1].startswith("gpu0@node-088 ")
    hidden = re.fullmatch(r"and (\d+) more workers: (\d+) running", shown[-2])
    assert hidden is not None
    rows = len(shown) - 2 - first
    assert int(hidden[1]) == int(hidden[2]) == MANY - rows
    text = "\n".join(shown)
    assert "1 silent worker: gpu2@node-250, last seen " in text
    assert "1 failed job of toy among the last 1,200" in text
    assert "140 ms / 151 ms" in text  # every worker counts into the percentiles
    top.press("s")
    shown = top.wait_for("sort: tokens/s").splitlines()
    assert shown[first].startswith("gpu0@node-088 ")
    assert not re.search(r"\x1b\[[\d;]*\b3[0-7]m", top.raw), "NO_COLOR is set"
    # Ctrl-Z gives the terminal back, and `fg` takes it again.
    top.press("\x1a")
    top.wait_stopped()
    wait_until(lambda: top.raw.endswith(FIRST_SCREEN + "\x1b[?25h"))
    top.process.send_signal(signal.SIGCONT)
    wait_until(lambda: top.raw.count(SECOND_SCREEN) == 2)
    top.press("q")
    assert top.ended() == 0


def test_a_line_of_status_has_a_worker_with_preempting_jobs_in_80_columns(
    fleet: RedisServer,
) -> None:
    shown = run("status", "--redis", fleet.url).out.splitlines()
    assert max(map(len, shown)) <= 80
    [line] = [line for line in shown if line.startswith("gpu5@node-077 ")]
    assert line.split()[2:4] == ["16/16", "+2"]
    assert shown[0] == "300 workers  323 of 4,800 running, 2 preempting  0 waiting  3,490 tokens/s"


def test_a_screen_of_120_by_40_is_full_of_jobs_and_the_last_hour(
    fleet: RedisServer, terminal: Opener
) -> None:
    with connect(fleet.url) as store:
        for ago in range(100):
            at = {"at": time.time() - 30 * ago, "workers": 1, "running": 1, "waiting": ago}
            figures = {"tokens_per_s": 1234.0, "first_token_p95_ms": 1700.0}
            store.rpush(keys.HISTORY, json.dumps(at | figures))
        push(store, "[red]evil", *(f"stock{number}" for number in range(30)))
        inbox_watch.look(store, "toy")
        top = terminal("top", "--redis", fleet.url, *QUICK, columns=120, lines=40)
        shown = top.wait_for("tokens/s  now 1,234", "stock1 ", "q quit")
        assert "first token p95  now 1.7 s" in shown
        assert "jobs that wait" in shown
        assert "0 jobs running, 31 waiting; the first" in shown
        lines = shown.splitlines()
        assert len(lines) == 40
        assert sum(not line.strip() for line in lines) <= 5, shown
        assert max(map(len, lines)) <= 120
        # As on a narrower screen, the workers that do most are among them.
        assert "gpu5@node-077" in shown
        assert "and 2" in lines[-2]
        assert "[red]evi" in shown, "markup stays text"
        top.resize(80, 24)
        wait_until(lambda: "stock1 " not in top.screen())
        top.press("q")
        assert top.ended() == 0
        store.delete(keys.HISTORY, keys.waiting("toy"), "llorch.toy")


@pytest.mark.parametrize("columns", [1, 24, 25, 26])
def test_a_narrow_terminal_has_charts_of_at_least_a_column(columns: int) -> None:
    point = Point(at=1000.0, workers=1, running=1, waiting=0, tokens_per_s=1.0)
    drawn = Console(width=columns, file=io.StringIO())
    drawn.print(charts([point], now_s=1000.0, columns=columns, lines=20))


def test_a_key_of_another_encoding_is_passed_over_and_ends_nothing() -> None:
    heard: list[str] = []
    screen = LiveScreen(Console(), lambda: "", lambda key: heard.append(key) is None)
    keyboard, keys = os.pipe()
    for typed in (b"\xe9", b"s\xe9"):
        os.write(keys, typed)
        assert screen._heard_keys(keyboard)
    assert heard == ["s"]
    os.close(keys)
    assert not screen._heard_keys(keyboard), "it is closed"
    os.close(keyboard)


def test_top_says_that_redis_is_away_and_comes_back_with_it(
    fleet: RedisServer, terminal: Opener
) -> None:
    top = terminal("top", "--redis", fleet.url, *QUICK, columns=80, lines=24)
    top.wait_for("300 workers")
    fleet.halt()
    top.wait_for("No Redis at redis://", "Trying again; below is", "300 workers")
    fleet.start()
    wait_until(lambda: "Trying again" not in top.screen())
    # A Redis that hangs refuses nothing. The keys go on working.
    with fleet.paused():
        top.wait_for("Redis does not reply. Trying again; below is")
        top.press("s")
        top.wait_for("sort: tokens/s")
        top.press("\x03")
        assert top.ended() == 130


def test_status_watch_shows_the_status_again_and_again(
    fleet: RedisServer, terminal: Opener
) -> None:
    status = terminal("status", "--watch", "--redis", fleet.url, *QUICK, columns=80, lines=24)
    status.wait_for("llorch status", "llorch.toy", "gpu5@node-077", "sort: load")
    with connect(fleet.url) as store:
        store.lpush("llorch.toy", "a job")
        status.wait_for(" 300       1 ")
        store.delete("llorch.toy")
    status.press("q")
    assert status.ended() == 0
    piped = Started("status", "--watch", "--redis", fleet.url, *QUICK)
    piped.wait_for("llorch.toy", count=2)
    piped.signal(signal.SIGINT)
    assert piped.ended() == 130


def test_a_script_reads_a_document_a_line_also_while_redis_is_away(fleet: RedisServer) -> None:
    command = [sys.executable, "-P", "-m", "llorch_worker.cli", "top", "--json", *QUICK]
    with subprocess.Popen(
        [*command, "--redis", fleet.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    ) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        first = json.loads(top.stdout.readline())
        [model] = first["models"]
        assert model["recent"]["e2e_ms"]["p50"] == pytest.approx(2**10, rel=0.2)
        assert (model["workers"], model["slots"], model["running"]) == (300, 4800, 323)
        assert model["queues"]["high"] == {"jobs": 0, "oldest_s": None}
        fleet.halt()
        seen = []
        for line in top.stdout:
            document = json.loads(line)
            seen.append("error" in document)
            assert document["at"] > first["at"]
            if seen[-1] and seen.count(True) == 1:
                assert document["error"]["code"] == "REDIS_UNREACHABLE"
                fleet.start()
            if seen[-1] < any(seen):
                break
        top.stdout.close()
        assert top.stderr.read() == "", "it ends with its reader"


def test_without_a_terminal_top_shows_everything_once(fleet: RedisServer) -> None:
    ran = run("top", "--redis", fleet.url, COLUMNS="")
    assert ran.code == 0
    assert ran.out.startswith("300 workers  323 of 4,800 running, 2 preempting")
    assert len(re.findall(r"^gpu\d@node-\d{3} ", ran.out, re.MULTILINE)) == MANY
    assert "not a terminal" in ran.err
    assert "\x1b" not in ran.out


def test_status_watch_is_not_for_one_job() -> None:
    ran = run("status", "some-job", "--watch")
    assert ran.code == 2
    assert "llorch watch some-job" in ran.err
