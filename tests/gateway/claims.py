"""What the tests of another server claim of its answers, as tables: a request, and what the answer
must have. A claim that does not hold here says why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.openai_types import check_event, check_response

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
_PAGE = Path(__file__).resolve().parents[2] / "docs/HTTP.md"
ORIGIN = "https://web.example"
"""Of pages that may call the gateway with keys."""
_CHECKS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    CHAT: (ChatCompletion.model_validate, ChatCompletionChunk.model_validate),
    # The package's type has no null where a chunk has no reason yet.
    COMPLETIONS: (Completion.model_validate, dict),
    RESPONSES: (check_response, check_event),
}
"""Whether the ``openai`` package's types have an answer, and an event of its stream."""


@dataclass(frozen=True)
class Door:
    """A gateway, and a second one that asks for a key."""

    http: httpx.Client
    api: OpenAI
    keyed: httpx.Client
    key: str

    def ask(self, path: str, body: Any) -> dict[str, Any]:
        """The answer's document with its status as ``http``; a stream :func:`_folded`."""
        answer = self.http.post(path, json=body)
        if answer.headers["content-type"].startswith("text/event-stream"):
            return _folded(answer.text, _CHECKS.get(path, (dict, dict))[1])
        # The package says of no null of an echo's first token that it may be there.
        if answer.status_code == 200 and path in _CHECKS and "echo" not in body:
            _CHECKS[path][0](answer.json())
        return {"http": answer.status_code, **answer.json()}


def _folded(text: str, check: Callable[[Any], object]) -> dict[str, Any]:
    """A stream as ``events``, and what they come to: ``texts`` by choice, ``reasons`` ..."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    for event in events:
        check(event)
    texts: dict[str, str] = {}
    choices = [choice for event in events for choice in event.get("choices", ())]
    for choice in choices:
        piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[str(choice["index"])] = texts.get(str(choice["index"]), "") + piece
    return {
        "http": 200,
        "events": events,
        "types": [event.get("type") for event in events],
        "done": data[-1:] == ["[DONE]"],
        "texts": texts,
        "reasons": [reason for each in choices if (reason := each["finish_reason"])],
        "usages": [event.get("usage") for event in events],
    }


@dataclass(frozen=True, eq=False)
class Claim:
    of: str
    """The file and the test that make it."""
    check: Callable[[Door], None]
    unmet: str = ""
    """Why it does not hold here."""

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        if not self.unmet:
            return []
        return [pytest.mark.xfail(raises=AssertionError, strict=True, reason=self.unmet)]


class Suite:
    """All claims of one suite of tests that concern what is here."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def rows(
        self, path: str, body: Mapping[str, Any], file: str, rows: Iterable[tuple[Any, ...]]
    ) -> None:
        """Each row: the test in ``file``, fields beside ``body``, what the answer must have, and
        why it has not.

        What it must have: its places, "choices.0.text", to values or to what is true of them. A
        status ("http") other than 200 is a place too. None is a place that is null or not there.
        """
        for test, fields, must, *unmet in rows:
            check = _row(path, {**body, **fields}, must)
            self.claims.append(Claim(f"{file}::{test}", check, *unmet))

    def story(self, of: str, unmet: str = "") -> Callable[[Callable[[Door], None]], None]:
        """A claim about several requests."""
        return lambda check: self.claims.append(Claim(of, check, unmet))

    def held_by(self, ours: Mapping[str, Iterable[str]]) -> None:
        """Claims that another test here holds already: "test_file.py::test", in this folder."""
        for test, claims in ours.items():
            self.claims += [Claim(of, _there(test)) for of in claims]

    def params(self) -> list[Any]:
        """For parametrize. A claim that is marked as unmet and holds fails."""
        return [pytest.param(claim, id=claim.of, marks=claim.marks) for claim in self.claims]

    def results(self, door: Door) -> dict[Claim, Future[None]]:
        """What comes of each claim; all are held against ``door`` side by side."""
        with ThreadPoolExecutor(8) as pool:
            return {claim: pool.submit(claim.check, door) for claim in self.claims}

    def is_counted(self, name: str) -> bool:
        """Whether the page about HTTP has how many hold."""
        met = sum(not claim.unmet for claim in self.claims)
        return f"{met} of {len(self.claims)} of {name}'s" in " ".join(_PAGE.read_text().split())


def _row(path: str, body: Mapping[str, Any], must: Mapping[str, Any]) -> Callable[[Door], None]:
    def check(door: Door) -> None:
        answer = door.ask(path, {k: v for k, v in body.items() if v is not ...})
        for place, wanted in {"http": 200, **must}.items():
            found = at(answer, place)
            held = wanted(found) if callable(wanted) else found == wanted
            assert held, f"{place} is {found!r} in {answer}"

    return check


def _there(test: str) -> Callable[[Door], None]:
    def check(_: Door) -> None:
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), test

    return check


def at(document: Any, place: str) -> Any:
    """What is at this place, or None."""
    for name in place.split("."):
        if isinstance(document, list):
            at = int(name)
            document = document[at] if -len(document) <= at < len(document) else None
        else:
            document = document.get(name) if isinstance(document, dict) else None
    return document


def size(low: int, high: int | None = None) -> Callable[[Any], bool]:
    return lambda value: value is not None and low <= len(value) <= (high or low)


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: re.fullmatch(pattern, value, re.DOTALL) is not None


def says(*words: object) -> Callable[[Any], bool]:
    return lambda value: all(str(word) in value for word in words)


def as_json(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: holds(json.loads(value))


def some(value: Any) -> bool:
    return bool(value)


def each(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: bool(values) and all(map(holds, values))
