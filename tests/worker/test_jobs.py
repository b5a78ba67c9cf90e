"""Jobs through a real worker with the real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client, Job
from llorch_worker.contract import (
    TASK_NAME,
    Cancelled,
    Tokens,
)
from tests.services import WorkerProcess, begun, run_python, wait_until

GET_S = 60
QUEUE = "llorch.stories"
PROMPT = "Once upon a time"

STOCK_PRODUCER = """
import json, os, sys
for name in ("llorch_worker", "tasks", "torch", "pydantic"):
    sys.modules[name] = None  # as if it were not installed
from celery import Celery
url = os.environ["LLORCH_REDIS_URL"]
app = Celery(broker=url, backend=url)
kwargs = json.loads(os.environ["KWARGS"])
result = app.send_task("llorch.generate", kwargs=kwargs, queue="llorch.stories")
try:
    print(json.dumps({"id": result.id, "value": result.get(timeout=60)}))
except Exception as error:
    print(json.dumps({"id": result.id, "type": type(error).__name__, "args": error.args}))
"""


def produce(worker: WorkerProcess, **kwargs: object) -> dict[str, object]:
    """What a service gets that has Celery and nothing of ours."""
    answer = run_python(STOCK_PRODUCER, worker.redis_url, KWARGS=json.dumps(kwargs))
    assert isinstance(answer, dict)
    return answer


def test_a_job_whose_producer_wants_no_result_ends_all_the_same(
    story_worker: WorkerProcess, stock: Celery, client: Client
) -> None:
    kwargs = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
    sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, ignore_result=True)
    events = [entry.event for entry in client.job(sent.id).stream(timeout=GET_S)]
    assert sum(len(event.ids) for event in events if isinstance(event, Tokens)) == 5
    assert events[-1].type == "finished"
    assert client.job(sent.id).status().state == "succeeded"


def test_a_stock_producer_gets_a_dict(story_worker: WorkerProcess) -> None:
    answer = produce(story_worker, prompt=PROMPT, max_tokens=16, temperature=0)
    value = answer["value"]
    assert isinstance(value, dict)
    assert value["id"] == answer["id"]
    assert value["text"] == value["choices"][0]["text"] != ""
    assert value["usage"] == {
        "prompt": 5,
        "cached": 0,
        "completion": 16,
        "reasoning": 0,
        "accepted_draft_tokens": 0,
    }
    assert value["worker"] == story_worker.hostname


def test_a_refused_job_gives_a_stock_producer_the_code_and_the_faults(
    story_worker: WorkerProcess,
) -> None:
    answer = produce(story_worker, prompt=PROMPT, max_tokens=0, temprature=1)
    assert answer["type"] == "InvalidRequest"
    arguments = answer["args"]
    assert isinstance(arguments, list)
    message, code, retriable, faults = arguments
    assert code == "INVALID_REQUEST"
    assert not retriable
    assert {fault["field"] for fault in faults} == {"max_tokens", "temprature"}
    assert "max_tokens" in message


def test_sixteen_jobs_share_forward_passes(story_worker: WorkerProcess, client: Client) -> None:
    before = steps(story_worker)
    with story_worker.paused():
        jobs = [client.submit(prompt=PROMPT, max_tokens=100, seed=i) for i in range(16)]
    tokens = sum(job.result(GET_S).usage.completion for job in jobs)
    wait_until(lambda: steps(story_worker) > before, what="the next announcement")
    used = steps(story_worker) - before
    assert tokens > 16 * 50
    assert used < tokens / 2, f"{tokens} tokens took {used} steps"


def steps(worker: WorkerProcess) -> int:
    with Celery(broker=worker.redis_url, set_as_current=False) as app:
        inspect = app.control.inspect(destination=[worker.hostname], timeout=60, limit=1)
        stats = wait_until(inspect.stats)
    return int(stats[worker.hostname]["engine"]["steps_total"])


def test_inspect_stats_carries_the_engine_and_the_pool_shows_it(
    story_worker: WorkerProcess, stock: Celery
) -> None:
    inspect = stock.control.inspect(destination=[story_worker.hostname], timeout=60, limit=1)
    stats = wait_until(inspect.stats)[story_worker.hostname]
    engine = stats["engine"]
    assert engine["model"] == "stories"
    assert set(engine["bytes"]) == {"weights", "kv", "rope", "masks"}
    for figure in ("device", "running", "waiting", "tokens_per_s", "kv_blocks_free"):
        assert figure in engine
    assert stats["pool"]["max-concurrency"] == 16
    assert stats["pool"]["model"] == ["stories"], "what Flower shows on its Pool tab"
    assert stats["prefetch_count"] == 16


def test_a_worker_that_answers_is_ready_and_announced(
    story_worker: WorkerProcess, client: Client
) -> None:
    (worker,) = client.workers()
    assert worker.hostname == story_worker.hostname
    assert worker.model == "stories"
    assert worker.max_context == 512
    assert [card.name for card in client.models()] == ["stories"]


def test_the_time_in_the_queue_counts_from_the_producer(
    story_worker: WorkerProcess, client: Client, stock: Celery
) -> None:
    kwargs = {"prompt": PROMPT, "max_tokens": 2}
    sent = stock.send_task(
        TASK_NAME, kwargs=kwargs, queue=QUEUE, headers={"llorch_enqueued_at": time.time() - 60}
    )
    assert sent.get(timeout=GET_S)["timings"]["queue_ms"] > 60_000
    assert client.submit(prompt=PROMPT, max_tokens=2).result(GET_S).timings.queue_ms < 30_000


def test_a_deadline_that_passed_in_the_queue_ends_the_job_with_that_reason(
    story_worker: WorkerProcess, stock: Celery
) -> None:
    sent = stock.send_task(
        TASK_NAME,
        kwargs={"prompt": PROMPT, "max_tokens": 400, "deadline_s": 1.0},
        queue=QUEUE,
        headers={"llorch_enqueued_at": time.time() - 60},
    )
    assert sent.get(timeout=GET_S)["choices"][0]["finish_reason"] == "deadline"


def test_terminate_stops_one_generation_and_leaves_its_neighbour_as_it_would_be_alone(
    story_worker: WorkerProcess, client: Client, stock: Celery
) -> None:
    def neighbour() -> Job:
        return client.submit(prompt=PROMPT, max_tokens=200, seed=5, ignore_eos=True)

    alone = neighbour().result(GET_S)
    beside = begun(neighbour())
    victim = begun(client.submit(prompt=PROMPT, max_tokens=500, n=8, ignore_eos=True))
    stock.control.revoke(victim.id, terminate=True)
    with pytest.raises(Cancelled):
        victim.result(GET_S)
    assert beside.result(GET_S).choices == alone.choices


def test_a_prompt_is_scored_without_a_token(
    story_worker: WorkerProcess, stock: Celery, client: Client
) -> None:
    kwargs: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 0, "prompt_logprobs": 2}
    sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE)
    value = json.loads(json.dumps(sent.get(timeout=GET_S)))
    assert value["choices"] == [
        {"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}
    ]
    assert value["usage"] == {
        "prompt": 5,
        "cached": 0,
        "completion": 0,
        "reasoning": 0,
        "accepted_draft_tokens": 0,
    }
    first, *others = value["prompt_logprobs"]
    assert first is None
    assert len(others) == 4
    for entry in others:
        assert {"id", "text", "logprob", "top"} <= set(entry)
        likeliest, second = (top["logprob"] for top in entry["top"])
        assert 0 >= likeliest >= second
        assert likeliest >= entry["logprob"]
    events = [entry.event for entry in client.job(sent.id).stream(timeout=GET_S)]
    assert [event.type for event in events] == ["started", "finished"]
    again = client.submit(**kwargs).result(GET_S)
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[0] is None
    assert [e.logprob for e in again.prompt_logprobs[1:] if e] == [e["logprob"] for e in others]
