"""Questions about tokens, and how long those who ask and answer them wait."""

from __future__ import annotations

import asyncio

import pytest

from llorch_worker.broker.connections.connection import (
    connect,
    connect_async,
    longest_wait_s,
)
from llorch_worker.broker.fleet import token_questions
from llorch_worker.contract import ModelNotServed
from llorch_worker.contract.token_questions import TokenizeText
from llorch_worker.worker.token_desk import LISTEN_S
from tests.services import RedisServer

QUESTION = TokenizeText(prompt="x")


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    """With the shortest time for replies that a URL may give."""
    return f"{redis_server.url}?socket_timeout=2"


def test_nobody_waits_for_a_question_longer_than_for_a_reply(url: str) -> None:
    with connect(url) as client:
        assert longest_wait_s(client, LISTEN_S) == 1.0


def test_an_answer_may_take_longer_than_a_reply(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_questions, "ANSWER_TIMEOUT_S", 2.2)

    async def ask() -> None:
        async with connect_async(url) as client:
            await token_questions.ask(client, "unanswered", QUESTION)

    with pytest.raises(ModelNotServed):
        asyncio.run(ask())
