"""Tokens that gather, so that many cost one turn of the loop."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from llorch_worker.servers import gathering
from llorch_worker.servers.gathering import GatheringSelector


@pytest.fixture
def selector(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatheringSelector]:
    monkeypatch.setattr(gathering, "UNREAD_GATHER_S", 300)
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


def test_what_nobody_reads_waits_for_company(
    selector: GatheringSelector, pairs: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def come(_: float) -> None:
        pairs[1].send(b"x")

    monkeypatch.setattr(selector._is_called, "wait", come)
    selector.stream("an answer", is_read=False)
    pairs[0].send(b"x")
    assert names(selector.select()) == "ab"


def test_a_request_that_begins_ends_the_wait(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("an answer", is_read=False)
    pairs[0].send(b"x")
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(selector.select)
        while not ready.done():
            selector.hurry()
        assert names(ready.result()) == "a"


def test_nothing_waits_without_an_answer_that_streams(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("an answer", is_read=False)
    selector.end("an answer")
    pairs[0].send(b"x")
    assert names(selector.select()) == "a"


def test_what_somebody_reads_waits_as_if_all_were_read(
    selector: GatheringSelector, pairs: list[socket.socket]
) -> None:
    selector.stream("one", is_read=False)
    selector.stream("another", is_read=True)
    pairs[1].send(b"x")
    assert names(selector.select()) == "b"
