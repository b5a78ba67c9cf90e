"""Jobs through the queue from the command line, against a real worker."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.queues import place_of
from llorch_worker.cli.enqueue import enqueue
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest
from tests.broker.steps import announce
from tests.cli.command import Served, Started, run
from tests.latch import Latch
from tests.services import WorkerProcess, own_redis, wait_until
from tests.store import job_ids

LONG = ("--max-tokens", "450", "--ignore-eos")


@pytest.fixture(autouse=True)
def _redis(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_REDIS_URL", served.redis_url)


def test_submit_prints_the_id_and_watch_all_the_tokens() -> None:
    submitted = run("submit", "Once upon a time", "--max-tokens", "20", "-t", "0", fresh=True)
    assert submitted.code == 0, submitted
    job = submitted.out.strip()
    watched = run("watch", job, fresh=True)
    assert watched.code == 0, watched
    result = run("watch", job, "--json").json
    assert result["id"] == job
    assert watched.out == result["text"] + "\n"
    assert "20 tokens" in watched.err
    shown = run("status", job).out
    assert re.fullmatch(
        rf"{job} succeeded by \S+, 20 tokens, \d+/s, first after \d+ ms, length, "
        r"after .* in the queue, sent .* ago\n",
        shown,
    )
    document = run("status", job, "--json").json
    assert (document["tokens"], document["usage"]["completion"]) == (20, 20)
    assert document["timings"] == result["timings"]


def test_wait_and_stream_print_the_same_text() -> None:
    options = ("Lily", "--max-tokens", "24", "--seed", "5")
    waited, streamed = run("submit", *options, "--wait"), run("submit", *options, "--stream")
    assert waited.code == streamed.code == 0, (waited, streamed)
    assert waited.out == streamed.out != ""


def test_every_choice_is_printed() -> None:
    ran = run("submit", "The king", "-n", "3", "--max-tokens", "5", "--stream")
    assert [line for line in ran.out.splitlines() if "of 3" in line] == [
        "── 1 of 3 ──",
        "── 2 of 3 ──",
        "── 3 of 3 ──",
    ]


def test_json_is_one_document_with_the_result() -> None:
    ran = run("submit", "--json", "--wait", "--max-tokens", "3", "--", "-t is a prompt here")
    assert ran.code == 0, ran
    assert ran.json["usage"]["completion"] == 3
    assert set(run("submit", "x", "--max-tokens", "1", "--json").json) == {"id"}


def test_a_cancelled_job_ends_as_cancelled_also_for_its_watcher(
    served: Served, served_worker: WorkerProcess
) -> None:
    # Behind others of a worker that stands still: it cannot have ended before the cancel comes.
    with Client(served.redis_url) as client, served_worker.paused():
        for _ in range(20):
            client.submit(prompt="x", max_tokens=1)
        job = run("submit", "Every night", *LONG).out.strip()
        assert run("status", job, "--json").json["state"] == "queued"
        assert re.search(r"queued, behind about .*, sent \d+ s ago$", run("status", job).out)
        cancelled = run("cancel", job, "--json", fresh=True)
        assert (cancelled.code, cancelled.json["cancelling"]) == (0, True), cancelled
    watched = run("watch", job)
    assert watched.code == 1, watched
    assert watched.err.splitlines()[-1] == "error: the job was cancelled"
    assert run("status", job, "--json").json["state"] == "cancelled"
    assert "had already ended" in run("cancel", job).out


def test_ctrl_c_while_waiting_cancels_the_job(served: Served) -> None:
    with Client(served.redis_url) as client:
        before = job_ids(client.redis)
        command = Started("submit", "One day", *LONG, "-n", "16", "--stream")
        command.wait_for("── 1 of 16")
        command.signal(signal.SIGINT)
        command.wait_for(" is cancelled")
        assert command.ended() == 130
        (job,) = job_ids(client.redis) - before
        wait_until(lambda: client.job(job).status().ended)
        assert client.job(job).status().state == "cancelled"


def test_a_stream_says_why_nothing_comes_and_who_goes_on(
    own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    submit = ("submit", latch.prompt(), "--max-tokens", "3", "--stream")
    command = Started(*submit, LLORCH_REDIS_URL=own_client.settings.redis_url)
    command.wait_for("no token for 5 s: the worker is busy, or it died and another goes on ")
    os.kill(own_worker.engine_pid(), signal.SIGKILL)
    latch.open()
    command.wait_for(f"{own_worker.hostname} goes on with it")
    assert command.ended() == 0


def test_ctrl_c_within_the_enqueue_leaves_no_job(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.redis_url) as client:
        before = job_ids(client.redis)
        submit = client.submit

        def interrupted(*request: Any, **options: Any) -> None:
            submit(*request, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            enqueue(client, GenerationRequest(prompt="One day", max_tokens=450, ignore_eos=True))
        (job,) = job_ids(client.redis) - before
        wait_until(lambda: client.job(job).status().ended)
        assert client.job(job).status().state == "cancelled"


def test_status_shows_workers_models_and_queues(served: Served) -> None:
    document = run("status", "--json", fresh=True).json
    # Redis may know of more, from other tests.
    assert served.model in {model["name"] for model in document["models"]}
    (worker,) = (each for each in document["workers"] if each["model"] == served.model)
    assert worker["engine"]["kv_blocks_total"] > 0
    shown = run("status").out
    assert f"llorch.{served.model}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_status_shows_since_when_a_worker_is_silent_and_cuts_no_name_in_a_pipe(
    served: Served,
) -> None:
    name = f"gpu0@{'a-long-name.' * 12}example"
    with connect(served.redis_url) as client:
        (alive,) = (card for card in registry.workers(client) if card.model == served.model)
        assert "last seen" not in run("status").out.partition("queue")[0]
        dead = alive.model_copy(update={"hostname": name, "last_seen": time.time() - 12})
        try:
            registry.announce(client, dead)
            shown = run("status", COLUMNS="").out
        finally:
            registry.withdraw(client, served.model, name)
            client.zrem(keys.live(served.model), place_of(served.model, name))
    (line,) = (line for line in shown.splitlines() if name in line)
    assert re.search(r"\d+ (s|min) ago$", line.rstrip())


def test_status_shows_a_queue_that_no_worker_serves(served: Served) -> None:
    with connect(served.redis_url) as client:
        client.lpush("llorch.tyo", "a job", "another", "and one more")
        client.lpush("shop:llorch.toy", "a job")
        document = run("status", "--json").json
        shown = run("status").out
        client.delete("llorch.tyo", "shop:llorch.toy")
    assert document["unserved_queues"]["llorch.tyo"] == 3
    assert "llorch.tyo: 3 jobs wait, no worker serves it" in shown
    assert "shop:llorch.toy: 1 job waits, no worker serves it; its producer's global" in shown
    assert "llorch.tyo" not in run("status").out


def test_status_names_no_prefix_of_a_model_that_lost_its_workers(served: Served) -> None:
    with connect(served.redis_url) as client:
        card = registry.workers(client)[0]
        registry.announce(client, card.model_copy(update={"model": "shop", "hostname": "w@gone"}))
        registry.withdraw(client, "shop", "w@gone")
        client.lpush("llorch.shop", "a job")
        shown = run("status").out
        client.delete("llorch.shop")
    assert re.search(r"^shop: 1 job waits, no worker serves it$", shown, re.MULTILINE)


def test_a_job_that_no_worker_takes_is_said_with_the_redis_where_it_waits() -> None:
    with own_redis() as server:
        said = run("submit", "Hi", "--redis", server.url)
        assert said.code == 1
        assert f"no worker has served any model at {server.url}" in said.err
        with connect(server.url) as client:
            announce(client)
        submitted = run("submit", "Hi", "--redis", server.url)
        assert f"no worker is running at {server.url}: the job waits" in submitted.err
        job = submitted.out.strip()
        shown = run("status", job, "--redis", server.url).out
        assert "queued, next, no worker is running, sent " in shown
        assert f"This is {server.url}." in run("status", "--redis", server.url).err
        run("cancel", job, "--redis", server.url)
        assert "so far" not in run("status", job, "--redis", server.url).out


def test_a_job_that_the_worker_refuses_is_an_error() -> None:
    ran = run("submit", "x", "--max-tokens", "100000", "--wait", "--json")
    assert ran.code == 2, ran
    assert ran.json["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"


def test_purge_deletes_what_waits_in_a_queue_and_says_before_how_much_that_is() -> None:
    with own_redis() as server, Client(server.url, model="toy") as client:
        announce(client.redis)
        jobs = [client.submit(prompt="x", priority=each) for each in ("high", "normal", "low")]
        client.redis.lpush("llorch.toy", "a stock producer's")
        asked = run("purge", "llorch.toy", "--redis", server.url)
        assert (asked.code, "llorch.toy has 3 waiting jobs; give --yes" in asked.err) == (2, True)
        assert run("purge", "toy", "--yes", "--redis", server.url).code == 2
        found = run("purge", "llorch.toy", "--yes", "--json", "--redis", server.url).json
        assert found == {"queue": "llorch.toy", "deleted": 3}
        states = [job.status().state for job in jobs]
        assert states == ["queued", "unknown", "unknown"]
        again = run("purge", "llorch.toy", "--yes", "--redis", server.url)
        assert again.out.startswith("deleted 0")


def test_a_job_for_one_worker_alone_is_refused_with_what_to_use() -> None:
    refused = run("submit", "x", "--worker", "gpu0@host")
    assert (refused.code, "LLORCH_MODEL_NAME of its own" in refused.err) == (2, True)
