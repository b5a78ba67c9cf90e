"""``llorch dead``: letters are shown without prompts, retried to a complete result, dropped."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs import claims, dead_letters
from llorch_worker.client import Client, Job
from llorch_worker.contract import AttemptsExhausted, Finished, Tokens
from tests.broker.steps import push, take
from tests.cli.command import run
from tests.messages import envelope
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import announce_model, letters_in, record_of

GET_S = 60
TOKENS = 400
SECRET = "a secret of mine"


@pytest.fixture(autouse=True)
def _redis(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_REDIS_URL", redis_server.url)


@pytest.fixture
def second_worker(redis_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """Finds the job that the first worker left behind."""
    with running_worker(
        redis_server.url, tmp_path, name="second", model_name="toy", TOY_STEP_MS=5,
        lease_s=3, sweep_s=0.2, max_attempts=1, max_deaths=1,
    ) as worker:  # fmt: skip
        yield worker


@pytest.fixture
def dead_job(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, client: Client
) -> Job:
    """A job whose only attempt died in the middle of its generation."""
    folder = tmp_path_factory.mktemp("first")
    with running_worker(
        redis_server.url,
        folder,
        model_name="toy",
        TOY_STEP_MS=5,
        lease_s=3,
        max_attempts=1,
        max_deaths=1,
    ) as worker:
        job = client.submit(prompt=SECRET, max_tokens=TOKENS)
        for entry in job.stream(timeout=GET_S):
            if isinstance(entry.event, Tokens):
                break
        wait_until(lambda: record_of(client.redis, job.id).get("progress") == "1")
        worker.process.kill()
        worker.wait_exit()
    return job


def exhausted(job: Job) -> Job:
    with pytest.raises(AttemptsExhausted):
        job.result(GET_S)
    return job


def test_a_dead_job_is_shown_and_its_retry_completes_it(
    dead_job: Job, second_worker: WorkerProcess, client: Client
) -> None:
    exhausted(dead_job)
    assert run("status", "--json").json["dead_letters"] == 1
    assert "1 dead letter: see llorch dead list" in run("status").out

    listed = run("dead", "list", fresh=True)
    assert f"{dead_job.id}  toy  1 attempt  " in listed.out
    assert "attempts exhausted" in listed.out
    assert max(map(len, listed.out.splitlines())) <= 80
    (letter,) = run("dead", "list", "--json").json["dead_letters"]
    assert (letter["id"], letter["model"], letter["retriable"]) == (dead_job.id, "toy", True)

    shown = run("dead", "show", dead_job.id)
    assert "w1@test" in shown.out
    document = run("dead", "show", dead_job.id, "--json")
    assert [claim["worker"] for claim in document.json["history"]] == ["w1@test"]
    for ran in (listed, shown, document):
        assert SECRET not in ran.out.lower()
        assert '"body"' not in ran.out.lower()
    raw, body = run("dead", "show", dead_job.id, "--message").out.splitlines()
    assert json.loads(raw)["headers"]["id"] == dead_job.id
    assert json.loads(body)[1]["prompt"] == SECRET
    document = run("dead", "show", dead_job.id, "--message", "--json")
    assert (document.json["message"], document.json["body"]) == (raw, json.loads(body))

    retried = run("dead", "retry", dead_job.id)
    assert (retried.code, retried.out) == (0, "1 job put back into the queue.\n")
    result = dead_job.result(GET_S)
    assert result.choices[0].token_ids == tuple(range(TOKENS))
    events = [entry.event for entry in dead_job.stream(timeout=GET_S)]
    assert [i for e in events if isinstance(e, Tokens) for i in e.ids] == list(range(TOKENS))
    assert [type(e) for e in events if e.type in ("finished", "failed")] == [Finished]
    assert run("dead", "list").out == "No dead letters.\n"


def test_a_body_with_a_lone_surrogate_is_shown(toy_worker: WorkerProcess, client: Client) -> None:
    headers = {"task": "llorch.nonsense", "id": "half"}
    message = envelope([[], {"prompt": "Zürich \ud83e"}, {}], headers=headers)
    client.redis.lpush("llorch.toy", json.dumps(message))
    wait_until(lambda: dead_letters.count(client.redis) == 1)
    body = run("dead", "show", "half", "--message").out.splitlines()[1]
    assert body == '[[], {"prompt": "Zürich \\ud83e"}, {}]'
    assert run("dead", "show", "half", "--message", "--json").json["body"] == json.loads(body)
    assert run("dead", "drop", "half").code == 0


def test_a_body_is_inflated_up_to_the_setting(
    toy_worker: WorkerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = [[], {"prompt": "x" * 100_000}, {}]
    headers = {"task": "llorch.nonsense", "id": "wide", "compression": "gzip"}
    message = envelope(zlib.compress(json.dumps(body).encode()), headers=headers)
    client.redis.lpush("llorch.toy", json.dumps(message))
    wait_until(lambda: dead_letters.count(client.redis) == 1)
    for most, shown in (("64KiB", None), ("1MiB", body)):
        monkeypatch.setenv("LLORCH_MAX_MESSAGE_BYTES", most)
        assert run("dead", "show", "wide", "--message", "--json").json["body"] == shown
    assert run("dead", "drop", "wide").code == 0


def test_a_letter_of_an_unknown_task_is_offered_no_retry(
    toy_worker: WorkerProcess, client: Client
) -> None:
    message = envelope([[], {}, {}], headers={"task": "mail.send", "id": "mail"})
    client.redis.lpush("llorch.toy", json.dumps(message))
    wait_until(lambda: dead_letters.count(client.redis) == 1)
    [letter] = run("dead", "list", "--json").json["dead_letters"]
    assert (letter["reason"], letter["retriable"]) == ("unknown task 'mail.send'", False)
    assert "no worker can run the message" in run("dead", "retry", "mail").err
    assert "llorch dead retry" not in run("dead", "show", "mail").out
    assert run("dead", "drop", "mail").code == 0


def test_malformed_letters_are_listed_not_retried_and_dropped(
    toy_worker: WorkerProcess, client: Client
) -> None:
    client.redis.lpush("llorch.toy", "no json", '{"headers": {"id": 5}}')
    wait_until(lambda: dead_letters.count(client.redis) == 2)
    listed = run("dead", "list", "--limit", "1")
    assert "malformed" in listed.out
    assert "1 more" in listed.err

    newest = json.loads(letters_in(client.redis)[0])["message"]
    (first, second) = (it["id"] for it in run("dead", "list", "--json").json["dead_letters"])
    assert run("dead", "show", first, "--message").out == f"{newest}\n", "it has no body"
    refused = run("dead", "retry", first)
    assert refused.code == 1
    assert "no worker can run the message" in refused.err
    document = run("dead", "retry", "--all", "--json").json
    assert document == {"retried": [], "left": {first: "malformed", second: "malformed"}}

    assert run("dead", "drop", first, "--json").json == {"dropped": [first]}
    assert run("dead", "drop", "--all").out == "1 letter dropped.\n"
    assert dead_letters.count(client.redis) == 0


def test_an_unknown_id_and_a_wrong_command_are_refused() -> None:
    for command in ("show", "retry", "drop"):
        ran = run("dead", command, "nobody", "--json")
        assert ran.code == 1
        assert ran.json["error"]["code"] == "UNKNOWN_LETTER"
    for command in ("retry", "drop"):
        assert run("dead", command).code == 2
        assert run("dead", command, "nobody", "--all").code == 2


@pytest.mark.parametrize(
    ("command", "said"), [("retry", "1 job put back into the queue"), ("drop", "1 letter dropped")]
)
def test_a_failure_in_the_middle_says_what_was_done(
    command: str, said: str, own_server: RedisServer, own_client: Client
) -> None:
    store = own_client.redis
    for job_id in ("older", "newer"):
        push(store, job_id)
        (claim,) = take(store)
        terms = claims.ClaimTerms.of(own_client.settings)
        dead_letters.bury(store, claim, "attempts exhausted", terms)
        claims.fail(store, claim, AttemptsExhausted("it died"), terms)
    # Nothing can be done with the second.
    store.set(keys.job("older"), "of another program")
    number = store.lindex(keys.DEAD, -1).partition(" ")[0]
    store.lset(keys.DEAD, -1, f"{number} x ")
    ran = run("dead", command, "--all", "--redis", own_server.url)
    assert (ran.code, ran.out) == (1, "")
    assert f"{said}, then: Redis at {own_server.url} refuses" in " ".join(ran.err.split())


def test_status_counts_a_suspect_as_queued_and_mentions_it(
    own_server: RedisServer, own_client: Client
) -> None:
    card = ModelCard(name="toy", max_context=4096, last_seen=0)
    announce_model(own_client.redis, "toy", card.model_dump_json())
    push(own_client.redis, "a")
    (claim,) = take(own_client.redis)
    claims.blame(own_client.redis, claim, max_attempts=3, alone=True)
    own_client.redis.zadd(keys.scheduled("toy"), {"later": 1})
    (model,) = run("status", "--json", "--redis", own_server.url).json["models"]
    assert (model["queued"], model["suspects"]) == (1, 1)
    shown = run("status", "--redis", own_server.url).out
    assert "1 suspect of toy" in shown
    assert "1 job of toy for a later time" in shown


def test_status_says_which_worker_has_no_engine_and_whose_died_lately(
    own_server: RedisServer, own_client: Client
) -> None:
    def card(name: str, **fields: Any) -> WorkerCard:
        return WorkerCard(
            hostname=name, pid=1, model="toy", max_context=4096, max_sequences=4, device="cpu",
            started_at=0, last_seen=time.time(), engine={}, **fields,
        )  # fmt: skip

    away = "the engine died: signal SIGSEGV; it starts again in 4 s"
    registry.announce(own_client.redis, card("w1@h", away=away, last_death_at=time.time()))
    for name, ago_s in (("w2@h", 120), ("w3@h", 60), ("w4@h", 86_400)):
        died = {"last_death": "exit code 9", "last_death_at": time.time() - ago_s}
        registry.announce(own_client.redis, card(name, **died))
    shown = " ".join(run("status", "--redis", own_server.url).out.split())
    assert f"1 worker without an engine: w1@h, {away}" in shown
    assert (
        "2 workers whose engine was lost and is back: w3@h, 1 min ago (exit code 9), and 1 more"
        in shown
    )
