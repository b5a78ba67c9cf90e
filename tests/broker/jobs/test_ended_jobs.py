"""The list of ended jobs is short, and holds nothing of what they said."""

from __future__ import annotations

from dataclasses import replace

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import ended_jobs
from llorch_worker.broker.jobs.ended_jobs import MOST_ENDED_JOBS, EndedJob, EndedJobs
from llorch_worker.client import Client
from llorch_worker.contract import (
    Cancelled,
    Choice,
    GenerationResult,
    InternalError,
    Timings,
    Usage,
)
from tests.broker.steps import claim_on

CLAIM = replace(claim_on("j"), list_key="llorch.toy", attempt=2)
TIMINGS = Timings(queue_ms=1, prefill_ms=2, first_token_ms=3, decode_ms=4)
RESULT = GenerationResult(
    id="j",
    model="toy",
    choices=(Choice(index=0, text="secret", token_ids=(1,), finish_reason="stop"),),
    usage=Usage(prompt=3, completion=1),
    seed=1,
    timings=TIMINGS,
    worker="w@h",
    metadata={"note": "secret"},
)


def test_every_kind_of_end_is_told_once_without_content(client: Client) -> None:
    ended = EndedJobs()
    for end in (RESULT, Cancelled("secret"), InternalError("secret")):
        ended.note(CLAIM, "w@h", end)
    ended.publish(client.redis)
    ended.publish(client.redis)
    assert "secret" not in str(client.redis.lrange(keys.ENDED_JOBS, 0, -1))
    failed, cancelled, done = ended_jobs.ended_jobs(client.redis, 10)
    assert (done.outcome, done.timings, done.attempts) == ("stop", TIMINGS, 2)
    assert (cancelled.outcome, cancelled.usage) == ("cancelled", None)
    assert (failed.outcome, failed.error, failed.model) == ("failed", "INTERNAL", "toy")


def test_the_list_and_what_waits_for_it_are_bounded(client: Client) -> None:
    ended = EndedJobs()
    for _ in range(2):
        for number in range(MOST_ENDED_JOBS + 5):
            ended.note(replace(CLAIM, job_id=str(number)), "w@h", RESULT)
        ended.publish(client.redis)
    assert client.redis.llen(keys.ENDED_JOBS) == MOST_ENDED_JOBS
    assert client.redis.ttl(keys.ENDED_JOBS) > 0
    (newest,) = ended_jobs.ended_jobs(client.redis, 1)
    assert newest.id == str(MOST_ENDED_JOBS + 4)


def test_observers_get_each_end() -> None:
    ended, seen = EndedJobs(), list[EndedJob]()
    ended.observe(seen.append)
    ended.note(CLAIM, "w@h", RESULT)
    ended.note(CLAIM, "w@h", Cancelled("secret"))
    assert [(job.outcome, job.usage) for job in seen] == [
        ("stop", RESULT.usage),
        ("cancelled", None),
    ]


def test_a_trace_is_told_to_observers_only(client: Client) -> None:
    ended, seen = EndedJobs(), list[EndedJob]()
    ended.observe(seen.append)
    ended.note(CLAIM, "w@h", RESULT, "0af7651916cd43dd8448eb211c80319c")
    assert seen[0].trace_id == "0af7651916cd43dd8448eb211c80319c"
    ended.publish(client.redis)
    assert seen[0].trace_id not in str(client.redis.lrange(keys.ENDED_JOBS, 0, -1))


def test_an_entry_that_cannot_be_read_hides_no_other(client: Client) -> None:
    ended = EndedJobs()
    ended.note(CLAIM, "w@h", RESULT)
    client.redis.delete(keys.ENDED_JOBS)
    ended.publish(client.redis)
    client.redis.lpush(keys.ENDED_JOBS, "{}", "{not json")
    assert [job.id for job in ended_jobs.ended_jobs(client.redis, 10)] == ["j"]
