"""Messages and headers that any producer may write."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import Any

import pytest

from llorch_worker.broker.messages.message import (
    OWNER,
    enqueue_time_s,
    read_envelope,
    read_task,
    reread,
)
from llorch_worker.contract import TASK_NAME
from tests.messages import GOOD_BODY, envelope

MOST = 2**25


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def protocol_1(task: Any, **headers: str) -> bytes:
    """A task whose body names it; bytes are a body as it is."""
    found = envelope(task, headers=headers)
    del found["properties"]["correlation_id"]
    return json.dumps(found).encode()


LISTS: list[Any] = [[]] * 1_000_000
TASK = {"task": TASK_NAME, "id": "one", "args": [], "kwargs": {}}
MANY = {**TASK, "kwargs": {"x": LISTS}}
NAMED = envelope(GOOD_BODY, headers={"id": "ü", OWNER: "mine"})
BEFORE = "\N{FOR ALL}"
"""A character whose UTF-16 holds the byte of a quotation mark."""
TOO_MUCH = {
    "a body of many lists": protocol_1(MANY),
    "an inflated body of many lists": protocol_1(
        zlib.compress(json.dumps(MANY).encode()), compression="gzip"
    ),
    "a body that inflates to more": protocol_1(
        zlib.compress(json.dumps({**TASK, "kwargs": {"x": "x" * MOST}}).encode()),
        compression="gzip",
    ),
    "a body in UTF-16": protocol_1(
        json.dumps(MANY | {"b": BEFORE}, ensure_ascii=False).encode("utf-16")
    ),
    "UTF-16": text(NAMED | {"x": [BEFORE, *LISTS]}).encode("utf-16"),
    "UTF-32": text(NAMED | {"x": LISTS}).encode("utf-32"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_message_that_only_python_reads_is_bounded_too(name: str) -> None:
    assert reread(TOO_MUCH[name], MOST) is None
    assert read_task(TOO_MUCH[name], MOST) is None


def test_a_message_larger_than_its_body_may_be_is_not_read_for_its_id() -> None:
    raw = json.dumps(envelope(TASK, headers={}) | {"x": "x" * 2**21}).encode()
    assert reread(raw, 2**19) is None
    assert reread(raw, 2**21) is not None


@pytest.mark.parametrize("mark", [b"", "\ufeff".encode()], ids=["plain", "byte order mark"])
def test_a_protocol_1_message_names_its_job_in_its_body(mark: bytes) -> None:
    body = json.dumps(TASK).encode()
    for raw in (protocol_1(mark + body), protocol_1(zlib.compress(body), compression="gzip")):
        again = reread(mark + raw, MOST)
        assert again is not None
        assert json.loads(again)["headers"]["id"] == "one"
        found = read_task(mark + raw, MOST)
        assert found is not None
        assert (found[0]["id"], found[1][:2]) == ("one", [[], {}])


def test_names_of_ours_in_an_envelope_are_ignored() -> None:
    others = {"unreadable": "a secret \x1b[2J", "size": "many", "payload": [[], {}, {}], "x": 1}
    found = read_envelope(json.dumps(envelope(GOOD_BODY) | others).encode(), MOST)
    assert (found.get("unreadable"), found["payload"]) == (None, GOOD_BODY)
    assert found["size"] == len(base64.b64decode(envelope(GOOD_BODY)["body"]))


def test_a_body_that_cannot_be_read_has_the_size_of_its_message() -> None:
    raw = json.dumps(envelope(b"{bad") | {"size": 0, "payload": GOOD_BODY}).encode()
    found = read_envelope(raw, MOST)
    assert found["size"] == len(raw)
    assert found["unreadable"] == "its body is not JSON: see character 2"


@pytest.mark.parametrize("header", [1_763_000_000, 1_763_000_000.5])
def test_a_unix_time_is_the_time_of_enqueueing(header: float) -> None:
    assert enqueue_time_s(header) == header


@pytest.mark.parametrize(
    "header",
    [10**400, math.inf, math.nan, -1, 0, 1, True, 1_763_000_000_000, "1763000000", None, []],
)
def test_anything_else_is_no_time(header: object) -> None:
    assert enqueue_time_s(header) is None
