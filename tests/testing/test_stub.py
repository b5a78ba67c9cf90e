"""The stub beyond what the cookbook shows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from celery import Celery, chord

pytest.importorskip("fakeredis", reason='needs the extra "testing"')

from llorch_worker import testing
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import ContextLengthExceeded, InternalError, InvalidRequest, Tokens
from llorch_worker.testing import Answer, Stub

GET_S = 30
llorch, llorch_model, llorch_stub = testing.llorch, testing.llorch_model, testing.llorch_stub


@pytest.fixture
def client(llorch: Stub) -> Any:
    with Client(llorch.url) as client:
        yield client


def test_each_word_is_an_event_in_every_choice(llorch: Stub, client: Client) -> None:
    llorch.answer("Once upon a time")
    job = client.submit(prompt="x", n=2, max_tokens=3)
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    words = [(e.choice, e.index, e.text) for e in events if isinstance(e, Tokens)]
    texts = ("Once", " upon", " a")
    assert words == [(c, i, text) for i, text in enumerate(texts) for c in (0, 1)]
    result = job.result(GET_S)
    assert [(c.text, c.finish_reason) for c in result.choices] == [("Once upon a", "length")] * 2


def test_an_answer_that_the_test_did_not_script_is_an_error(
    llorch: Stub,
    client: Client,
) -> None:
    llorch.answer("one", Answer("two", finish_reason="length"))
    ends = [client.submit(prompt="x").result(GET_S).choices[0] for _ in range(2)]
    assert [end.finish_reason for end in ends] == ["stop", "length"]
    with pytest.raises(InternalError, match="no answer"):
        client.submit(prompt="x").result(GET_S)
    llorch.answer(lambda request: {"a": "b"}[request.prompt])
    with pytest.raises(InternalError, match="KeyError"):
        client.submit(prompt="x").result(GET_S)


def test_a_job_that_waits_for_its_cancel_ends_at_its_deadline(
    llorch: Stub,
    client: Client,
) -> None:
    llorch.answer(Answer("so far", until_cancelled=True))
    result = client.submit(prompt="x", deadline_s=0.3).result(GET_S)
    assert (result.text, result.choices[0].finish_reason) == ("so far", "deadline")


def test_a_chord_and_the_async_client(llorch: Stub, client: Client) -> None:
    with Celery("own", broker=llorch.url, backend=llorch.url, set_as_current=False) as app:
        llorch.answer(lambda request: f"<{request.prompt}>")

        def job(prompt: str) -> Any:
            fields = {"prompt": prompt}
            return app.signature(
                "llorch.generate", kwargs=fields, queue="llorch.demo", immutable=True
            )

        end = chord([job("a"), job("b")], job("body"), app=app).delay()
        assert end.get(timeout=GET_S)["text"] == "<body>"
        assert {request.prompt for request in llorch.requests} == {"a", "b", "body"}
        with pytest.raises(InvalidRequest, match="promt: unknown field"):
            app.send_task(
                "llorch.generate", kwargs={"promt": "x"}, queue="llorch.demo"
            ).get(timeout=GET_S)  # fmt: skip

    async def ask() -> None:
        async with AsyncClient(llorch.url) as other:
            assert not await other.job("nobody sent this").cancel()
            found = await other.submit(prompt="x")
            assert (await found.result(GET_S)).text == "<x>"
            assert (await found.status()).state == "succeeded"
            with pytest.raises(ContextLengthExceeded):
                await other.submit(prompt="x", max_tokens=4096)

    asyncio.run(ask())
