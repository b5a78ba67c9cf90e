"""A model is replaced while HTTP callers wait for their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import Event, Restarted, Started, Tokens
from llorch_worker.gateway.bodies import Bodies
from llorch_worker.gateway.responses.progress import response_events
from llorch_worker.openai_api.fingerprint import system_fingerprint
from llorch_worker.openai_api.responses import new_record
from llorch_worker.openai_api.responses_request import ResponseRequest
from tests.gateway import sse
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.services import RedisServer, running_worker, wait_until

TOKENS, BEFORE = 12, 5
NEW = "".join(f"b{i} " for i in range(TOKENS))
STARTED = Started(
    worker="w", model="toy", model_fingerprint="b", arithmetic="none", prompt_tokens=1, queue_ms=0
)
FINGERPRINT = system_fingerprint(STARTED)


@pytest.fixture
def replaced(
    own_server: RedisServer, tmp_path: Path, latch: Latch
) -> Iterator[tuple[httpx.Client, Callable[[], None]]]:
    """A client, and what replaces the model and lets the jobs go on."""
    options: dict[str, Any] = {"model_name": "toy", "drain_s": 0, "TOY_STEP_MS": 5}
    with (
        running_gateway(own_server.url, tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        running_worker(own_server.url, tmp_path, TOY_FINGERPRINT="a", **options) as old,
        running_worker(own_server.url, tmp_path, name="w2", TOY_FINGERPRINT="b", **options) as new,
    ):
        # So that the old one claims.
        paused = new.paused()
        paused.__enter__()

        def replace() -> None:
            old.stop()
            paused.__exit__(None, None, None)
            latch.open()

        yield http, replace


def body(latch: Latch, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": latch.prompt(BEFORE), "max_tokens": TOKENS, **fields}


@contextmanager
def begun(
    http: httpx.Client, path: str, content: dict[str, Any], text: str
) -> Iterator[Iterator[str]]:
    """The lines of a stream that has sent ``text``."""
    with http.stream("POST", path, json=content) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        for line in lines:
            if text in line:
                break
        yield lines


def test_a_stream_that_has_sent_text_ends_with_an_error_that_says_to_try_again(
    replaced: tuple[httpx.Client, Callable[[], None]], latch: Latch
) -> None:
    http, replace = replaced
    with begun(http, "/v1/completions", body(latch, stream=True), "a0") as lines:
        replace()
        rest = list(lines)
    error = next(json.loads(line[6:])["error"] for line in rest if '"error"' in line)
    assert (error["llorch_code"], error["retriable"]) == ("MODEL_CHANGED", True)
    assert not any('"b' in line or "[DONE]" in line for line in rest)


def entries(*events: Event) -> AsyncIterator[StreamEntry]:
    async def read() -> AsyncIterator[StreamEntry]:
        for number, event in enumerate(events, 1):
            yield StreamEntry(f"{number}-0", event)

    return read()


def sent(*events: Event, after: int = -1, background: bool = False) -> list[Mapping[str, Any]]:
    """What a reader gets of a response whose job has these events by now."""
    request = ResponseRequest(input="x", model="toy", background=background)
    record = new_record(request, request.input, request.to_generation(request.input),
                        job_id="job", created_at=0)  # fmt: skip
    # The job itself is not read before its end.
    job: Any = None

    async def read() -> list[Mapping[str, Any]]:
        made = response_events(record, job, entries(*events), Bodies(), after=after)
        return [event async for event in made]

    return asyncio.run(read())


RESTARTED = Restarted(worker="w", attempt=2)
TEXT = Tokens(index=0, ids=(1,), text="a0")


@pytest.mark.parametrize("has_text", [False, True])
def test_a_response_that_has_sent_text_ends_with_that_error_too(has_text: bool) -> None:
    found = sent(STARTED, *[TEXT] * has_text, RESTARTED, STARTED)
    assert ("model_changed" in str(found[-1])) == has_text


@pytest.mark.parametrize("background", [False, True])
def test_so_does_one_that_is_read_again_from_an_event_of_the_text_before(background: bool) -> None:
    whole = sent(STARTED, TEXT, background=background)
    *_, last = (n for n, event in enumerate(whole) if event["type"] == "response.in_progress")
    # The job that begins again voids its earlier events.
    again = (RESTARTED, STARTED, TEXT)
    for after in range(-1, last + 1):
        found = sent(*again, after=after, background=background)
        assert found == whole[after + 1 :]
    for after in range(last + 1, len(whole) + 50):
        (error,) = sent(*again, after=after, background=background)
        assert (error["type"], error["sequence_number"]) == ("error", after + 1)
        assert error["code"] == "model_changed"


def test_who_waits_for_a_whole_answer_gets_that_of_the_new_model(
    replaced: tuple[httpx.Client, Callable[[], None]], latch: Latch
) -> None:
    http, replace = replaced
    job = http.post("/v1/jobs", json=body(latch)).json()["id"]
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        found: list[sse.ServerSentEvent] = []
        for event in sse.events(response.iter_lines()):
            found.append(event)
            if len(sse.token_ids(found)) == BEFORE:
                break
    replace()
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["status"] == "succeeded")
    result = http.get(f"/v1/jobs/{job}").json()["result"]
    assert (result["text"], result["model_fingerprint"]) == (NEW, "b")
    headers = {"Last-Event-ID": found[-1].id}
    with http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as response:
        again = list(sse.events(response.iter_lines()))
    assert again[0].type == "restarted"
    assert sse.text(again) == NEW


def test_answers_and_chunks_say_which_model_made_them(
    replaced: tuple[httpx.Client, Callable[[], None]], latch: Latch
) -> None:
    http, replace = replaced
    replace()
    answer = http.post("/v1/completions", json=body(latch)).json()
    assert (answer["choices"][0]["text"], answer["system_fingerprint"]) == (NEW, FINGERPRINT)
    with begun(http, "/v1/completions", body(latch, stream=True), "b0") as lines:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FINGERPRINT}
