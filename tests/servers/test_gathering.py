"""Tokens that gather, so that many cost one iteration of the loop."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from llorch_worker.servers import gathering
from llorch_worker.servers.gathering import GatheringSelector

INF = float("inf")
PATIENCE_S = 30


@pytest.fixture
def selector(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatheringSelector]:
    monkeypatch.setattr(gathering, "MOST_GATHER_S", 300)
    with GatheringSelector() as selector:
        yield selector


@pytest.fixture
def pairs(selector: GatheringSelector) -> Iterator[list[socket.socket]]:
    """The far ends of two sockets that the selector looks at."""
    with ExitStack() as held:
        ends = []
        for name in "ab":
            near, far = map(held.enter_context, socket.socketpair())
            selector.register(near, selectors.EVENT_READ, name)
            ends.append(far)
        yield ends


def names(ready: list[tuple[selectors.SelectorKey, int]]) -> str:
    return "".join(sorted(key.data for key, _ in ready))


def test_what_is_not_urgent_waits_for_company(
    selector: GatheringSelector, pairs: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(_: float) -> None:
        pairs[1].send(b"x")

    monkeypatch.setattr(selector._is_called, "wait", come)
    selector.stream("an answer", INF)
    pairs[0].send(b"x")
    assert names(selector.select()) == "ab"


def test_a_request_that_begins_ends_the_wait(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("an answer", INF)
    pairs[0].send(b"x")
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(selector.select)
        while not ready.done():
            selector.hurry()
        assert names(ready.result()) == "a"


def test_a_request_that_begins_before_the_wait_ends_it_too(
    selector: GatheringSelector, pairs: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answers(dict[object, float]):
        def values(self) -> Any:
            selector.hurry()
            return super().values()

    monkeypatch.setattr(selector, "_urgent_at_s", Answers({"an answer": INF}))
    pairs[0].send(b"x")
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(selector.select)
        try:
            assert names(ready.result(PATIENCE_S)) == "a"
        finally:
            selector.hurry()


def test_nothing_waits_without_an_answer_that_streams(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("an answer", INF)
    selector.end("an answer")
    pairs[0].send(b"x")
    assert names(selector.select()) == "a"


def test_one_urgent_answer_makes_all_urgent(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("one", INF)
    selector.stream("another", 0.0)
    pairs[1].send(b"x")
    assert names(selector.select()) == "b"
