"""``llorch.embed``, ``llorch.rerank`` and ``llorch.score`` through the queue: stock Celery and our
client."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from celery import Celery

from llorch_worker.broker.jobs import usage
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import (
    Cancelled,
    EmbedRequest,
    Finished,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    Started,
    Vectors,
)
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from tests.cli.command import run
from tests.decoders import write_judge
from tests.encoders import WIDTH, WORDS, text_of, write_encoder
from tests.services import REAL_APP, RedisServer, WorkerProcess, own_redis, running_worker
from tests.store import record_of
from tests.waiting import wait_until
from tests.worker.celery.remote import told

GET_S = 120
SECRET = "w17 w23"
TEXTS = [text_of(number) for number in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Iterator[WorkerProcess]:
    logs = tmp_path_factory.mktemp("worker")
    made = {"model": folder, "model_name": "vectors", "usage_days": 1}
    with running_worker(redis_server.url, logs, app=REAL_APP, **made) as worker:
        yield worker


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The vectors of :data:`TEXTS`."""
    with EmbeddingEngine.load(folder, device="cpu", dtype="float32") as engine:
        return engine.embed(TEXTS).numpy()


def send(stock: Celery, task: str, **fields: Any) -> Any:
    return stock.send_task(f"llorch.{task}", kwargs=fields, queue="llorch.vectors")


def test_a_stock_app_gets_the_vectors_of_a_list(
    worker: WorkerProcess, stock: Celery, expected: Any
) -> None:
    result = send(stock, "embed", input=TEXTS, metadata={"row": 7}).get(GET_S)
    read = [np.frombuffer(b64decode(each), "<f4") for each in result["embeddings"]]
    np.testing.assert_allclose(read, expected, atol=1e-5)
    assert result["dimensions"] == WIDTH
    assert result["metadata"] == {"row": 7}
    assert result["usage"]["prompt"] == sum(2 + len(text.split()) for text in TEXTS)
    listed = send(stock, "embed", input=TEXTS[1], dimensions=8, encoding_format="float").get(GET_S)
    assert np.shape(listed["embeddings"]) == (1, 8)


def test_a_stock_app_ranks_and_scores(worker: WorkerProcess, stock: Celery, expected: Any) -> None:
    cosines = expected[2:9] @ expected[1]
    ranked = send(stock, "rerank", query=TEXTS[1], documents=TEXTS[2:9], top_n=2).get(GET_S)
    assert [each["index"] for each in ranked["results"]] == [*cosines.argsort()[::-1][:2]]
    scored = send(stock, "score", text_1=TEXTS[1], text_2=TEXTS[2:9]).get(GET_S)
    np.testing.assert_allclose(scored["scores"], cosines, atol=1e-5)


def test_the_client_waits_or_follows(worker: WorkerProcess, client: Client, expected: Any) -> None:
    np.testing.assert_allclose(client.embed(TEXTS[:3]).vectors(), expected[:3], atol=1e-5)
    assert client.rerank(TEXTS[1], TEXTS[1:4]).results[0].index == 0
    assert client.score(TEXTS[1], TEXTS[1]).scores == pytest.approx([1.0])
    named = client.embed(input=TEXTS[:3]).vectors()
    np.testing.assert_allclose(named, expected[:3], atol=1e-5)
    assert client.rerank(query=TEXTS[1], documents=TEXTS[1:4]).results[0].index == 0
    job = client.submit(EmbedRequest(input=TEXTS))
    started, *parts, finished = [entry.event for entry in job.stream(timeout=GET_S)]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert all(isinstance(part, Vectors) for part in parts)
    told = np.frombuffer(b"".join(part.data for part in parts), "<f4")  # type: ignore[union-attr]
    np.testing.assert_allclose(told.reshape(-1, WIDTH), expected[: len(told) // WIDTH], atol=1e-5)
    assert finished.usage == job.result(GET_S).usage


def test_the_client_for_asyncio_does_the_same(
    worker: WorkerProcess, redis_server: RedisServer
) -> None:
    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(redis_server.url) as client:
            return (
                await client.embed(input=["w1"], encoding_format="float"),
                await client.rerank("w1", ["w2", "w1"]),
                await client.score(text_1="w1", text_2=["w1"]),
            )

    embedded, ranked, scored = asyncio.run(ask())
    assert len(embedded.embeddings[0]) == WIDTH
    assert ranked.results[0].index == 1
    assert scored.scores == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("task", "fields", "field"),
    [
        ("embed", {"input": ["w1", ""]}, "input.1"),
        ("embed", {"input": ["w1"] * 2_049}, "input"),
        ("embed", {"input": ["w1", " ".join(WORDS[:100])]}, "input.1"),
        ("embed", {"input": "w1", "dimensions": 65}, "dimensions"),
        ("embed", {"input": [[1], [300]]}, "input.1"),
        ("embed", {"input": "w1", "inputs": ["w1"]}, "inputs"),
        ("embed", {"input": "w1", "normalize": "yes"}, "normalize"),
        ("rerank", {"query": "w1", "documents": []}, "documents"),
        ("rerank", {"documents": ["w1"]}, "query"),
        ("score", {"text_1": ["w1", "w2"], "text_2": ["w1"] * 3}, "text_1"),
        ("generate", {"prompt": SECRET}, "task"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(
    worker: WorkerProcess, stock: Celery, task: str, fields: Any, field: str
) -> None:
    failed = send(stock, task, **fields)
    error = failed.get(GET_S, propagate=False)
    assert isinstance(error, InvalidRequest)
    assert [fault.field for fault in error.faults] == [field]
    assert SECRET not in worker.text()
    # Nothing else suffers.
    assert send(stock, "embed", input="w1").get(GET_S)["dimensions"] == WIDTH


def test_a_client_refuses_a_task_that_the_model_does_not_do(
    worker: WorkerProcess, client: Client
) -> None:
    card = client.model_card("vectors")
    assert card.tasks == ("llorch.embed", "llorch.rerank", "llorch.score")
    with pytest.raises(InvalidRequest, match=r"makes vectors: send llorch\.embed"):
        client.submit(prompt="x", model="vectors")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_chat_with_an_encoder_is_refused_before_the_first_line(
    worker: WorkerProcess, redis_server: RedisServer, folder: Path, loaded: bool
) -> None:
    refused = run("chat", folder if loaded else "vectors", "--redis", redis_server.url)
    assert refused.code == 2
    assert "makes vectors: send llorch.embed" in refused.err


def test_a_submit_for_an_encoder_says_nothing_of_sampling(
    worker: WorkerProcess, redis_server: RedisServer
) -> None:
    refused = run("submit", "x", "--model", "vectors", "--redis", redis_server.url)
    assert refused.code == 2
    assert "makes vectors" in refused.err
    assert "sampling" not in refused.err + refused.out


def test_a_job_of_texts_is_counted_and_cancelled_as_any_other(
    worker: WorkerProcess, client: Client
) -> None:
    job = client.submit(EmbedRequest(input=TEXTS, tenant="table", priority="low"))
    tokens = job.result(GET_S).usage.prompt
    today = usage.today()
    (row,) = [row for row in usage.read(client.redis, today, today) if row.tenant == "table"]
    assert (row.jobs, row.prompt_tokens, row.completion_tokens) == (1, tokens, 0)
    with worker.paused():
        waiting = client.submit(EmbedRequest(input=TEXTS))
        waiting.cancel()
    with pytest.raises(Cancelled):
        waiting.result(GET_S)
    assert "llorch.embed" in worker.text()


def test_one_key_is_one_job(worker: WorkerProcess, client: Client) -> None:
    first, again = (
        client.submit(EmbedRequest(input="w5", idempotency_key="once")) for _ in range(2)
    )
    assert first.id == again.id
    with pytest.raises(InvalidRequest, match="another request"):
        client.submit(EmbedRequest(input="w6", idempotency_key="once"))
    assert first.result(GET_S)


@pytest.mark.parametrize("metadata", [{"status": "FAILURE"}, {"finish_reason": "deadline"}])
def test_metadata_like_a_failure_free_no_key(
    worker: WorkerProcess, client: Client, metadata: dict[str, str]
) -> None:
    request = EmbedRequest(input="w5", idempotency_key=str(metadata), metadata=metadata)
    first = client.submit(request)
    assert first.result(GET_S)
    assert client.submit(request).id == first.id


@pytest.mark.parametrize("held", ["texts", "generation"])
def test_jobs_of_one_kind_and_their_rate_limit_hold_up_none_of_the_other(
    tmp_path: Path, held: str
) -> None:
    """Of a model that does both; the jobs of a kind are not computed for a while."""
    (tmp_path / "model").mkdir()
    model, closed = write_judge(tmp_path / "model", marked=False), tmp_path / "closed"
    made = {"model": model, "model_name": "both", "pooling": "last", "max_sequences": 2}
    asked: dict[str, JobRequest] = {
        "texts": EmbedRequest(input=["yes"] * 9, priority="low"),
        "generation": GenerationRequest(prompt="yes", max_tokens=4, priority="low"),
    }
    first, other = asked.pop(held), next(iter(asked.values()))
    with (
        own_redis() as server,
        running_worker(
            server.url, tmp_path, app="tests.faults.held_app", HELD=held, CLOSED=closed, **made
        ) as worker,
        Celery("stock", broker=server.url, set_as_current=False) as stock,
        Client(server.url, model="both") as client,
    ):
        closed.touch()
        jobs = [client.submit(first) for _ in range(5)]

        def claimed() -> int:
            return [record_of(client.redis, job.id)["state"] for job in jobs].count("claimed")

        wait_until(lambda: claimed() == 2)
        for job in [client.submit(other) for _ in range(5)]:
            job.result(GET_S)
        assert claimed() == 2, "the others wait where another worker can take them"
        closed.unlink()
        client.submit(other).result(GET_S)
        for job in jobs:
            job.result(GET_S)
        told(stock, worker, "rate_limit", task_name=first.task, rate_limit="1/h")
        client.submit(first).result(GET_S)
        for job in [client.submit(other) for _ in range(5)]:
            job.result(GET_S)
