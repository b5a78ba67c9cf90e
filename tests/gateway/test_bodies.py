"""A body costs what its bytes cost, on every route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, call

import httpx
import pytest
from fastapi import Response
from fastapi.responses import JSONResponse
from websockets.sync.client import connect

from llorch_worker.client import StreamEntry
from llorch_worker.contract import (
    Choice,
    Finished,
    GenerationResult,
    InvalidRequest,
    Started,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    Usage,
)
from llorch_worker.gateway.answering import Answering, Sender
from llorch_worker.gateway.batches import run as batch_run
from llorch_worker.gateway.batches.record import Counts
from llorch_worker.gateway.bodies import SMALL_BYTES, Bodies, LongJson, about_bytes
from llorch_worker.gateway.files.record import FileRecord
from llorch_worker.gateway.job_document import JobDocument, JobUrls
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.responding import Creation, Kept
from llorch_worker.gateway.responses import progress
from llorch_worker.gateway.responses.event_json import written_event
from llorch_worker.gateway.routes import files, jobs, tokens
from llorch_worker.openai_api.responses import new_record
from llorch_worker.openai_api.responses_events import ResponseEvents
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.tokens import TokenizeRequest
from tests.gateways import GatewayProcess

LARGE = 8 * 2**20
CONSOLE = ("/console/api/dead-letters/retry", "/console/api/dead-letters/drop")


def filled(before: str, item: str, after: str, size: int) -> bytes:
    """A body of at most ``size`` bytes, with as many items as it has room for."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return f"{before}{','.join([item] * count)}{after}".encode()


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_every_route_counts_what_a_body_holds(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = [
        path
        for path, methods in paths.items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    ]
    assert len(routes) >= 11
    body = filled('{"metadata": [', "[]", "]}", LARGE // 8)
    for route in (*routes, *CONSOLE):
        answer = http.post(route, content=body, headers={"Content-Type": "application/json"})
        assert "at most 100000 objects and lists" in refusal(answer), route


CHAT = '{"messages": [{"role": "user", "content": "Hi"}], '
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ['


# Made by the test alone: all of them are 30 MB, and every process would make them.
@pytest.mark.parametrize(
    ("make_body", "rule"),
    [
        (lambda: filled(CHAT + '"metadata": [', "[]", "]}", LARGE), "objects and lists"),
        (lambda: filled(CHAT + TOOL, "1", "]}}}]}", LARGE), "at most 1100000 values"),
        (
            lambda: filled(CHAT + '"chat_template_kwargs": {"a": [', "1", "]}}", LARGE),
            "at most 1100000 values",
        ),
        (
            lambda: filled(CHAT + TOOL, "1", "]}}}]}", LARGE // 4),
            "parameters: must be at most 262144 bytes as JSON",
        ),
        (lambda: names(600_000), "at most 100000 names and texts"),
        (lambda: names(1_001), "at most 1000 fields"),
        (
            lambda: filled(CHAT + '"stop_token_ids": [', '"a"', "]}", LARGE // 64),
            " rules; only up to 1000 are listed",
        ),
        (
            lambda: filled('{"messages": [', "{}", "]}", LARGE // 64),
            "messages: must have at most 1000",
        ),
    ],
)
def test_a_body_that_holds_too_much_is_refused_with_its_bound(
    http: httpx.Client, make_body: Callable[[], bytes], rule: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=make_body(), headers=headers)
    assert rule in refusal(answer)


def names(count: int) -> bytes:
    return json.dumps({f"f{n}": 1 for n in range(count)}).encode()


def test_a_message_of_a_socket_is_counted_too(gateway: GatewayProcess) -> None:
    body = filled('{"type": "response.create", "metadata": [', "[]", "]}", LARGE // 8)
    with connect(f"{gateway.url.replace('http', 'ws')}/v1/responses") as socket:
        socket.send(body.decode())
        error = json.loads(socket.recv(timeout=30))
    assert (error["status"], error["type"]) == (400, "error")
    assert "at most 100000 objects and lists" in error["error"]["message"]


def test_large_bodies_are_read_beside_the_event_loop_one_at_a_time() -> None:
    bodies, threads, release = Bodies(), set[int](), threading.Event()

    def work() -> None:
        threads.add(threading.get_ident())
        assert release.wait(30)

    async def large() -> None:
        jobs = asyncio.gather(*(bodies.run(SMALL_BYTES + 1, work) for _ in range(3)))
        async with asyncio.timeout(30):
            while bodies._one.statistics().tasks_waiting < 2:
                await asyncio.sleep(0)
        release.set()
        await jobs

    asyncio.run(large())
    assert threading.get_ident() not in threads

    async def small() -> int:
        return await bodies.run(SMALL_BYTES, threading.get_ident)

    assert asyncio.run(small()) == threading.get_ident()


def test_a_long_answer_of_ids_is_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    class Watched(tokens.Tokenized):
        def model_dump_json(self, **options: Any) -> str:
            threads.append(threading.get_ident())
            return super().model_dump_json(**options)

    async def asked(content: bytes) -> Response:
        card = SimpleNamespace(max_context=512)
        request = SimpleNamespace(body=AsyncMock(return_value=content))
        gateway = SimpleNamespace(
            check=lambda _: None,
            bodies=Bodies(),
            client=SimpleNamespace(model_card=AsyncMock(return_value=card)),
            ask=AsyncMock(return_value={"tokens": [7] * len(content)}),
        )
        body = TokenizeRequest(prompt=content.decode())
        return await tokens.tokenize(body, request, gateway)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "Tokenized", Watched)
    for size, beside in ((SMALL_BYTES, False), (SMALL_BYTES + 1, True)):
        answer = asyncio.run(asked(b"x" * size))
        assert json.loads(answer.body)["count"] == size
        assert (threads.pop() != threading.get_ident()) == beside


TIMINGS = Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0)
USED = Usage(prompt=1, completion=1)
FINISHED = Finished(finish_reason="stop", usage=USED, timings=TIMINGS)
STARTED = Started(worker="w", model="m", prompt_tokens=1, queue_ms=0)
GATEWAY: Any = SimpleNamespace(bodies=Bodies())
Note = Callable[[], None]


def scored(count: int) -> GenerationResult:
    """A result of so many tokens with twenty alternatives each."""
    top = tuple(TokenLogprob(id=i, text="a", logprob=-1.0) for i in range(20))
    each = TokenLogprobs(id=1, text="a", logprob=-1.0, top=top)
    choice = Choice(
        index=0,
        text="a" * count,
        token_ids=(1,) * count,
        finish_reason="stop",
        logprobs=(each,) * count,
    )
    return GenerationResult(
        id="j",
        model="m",
        choices=(choice,),
        usage=USED,
        seed=1,
        timings=TIMINGS,
        worker="w",
    )


def answering(note: Note) -> Answering:
    def noted(*_: object) -> dict[str, Any]:
        note()
        return {}

    body: Any = SimpleNamespace(
        answer=noted, idempotency_key=None, stream=False, wants_prompt_ids=False
    )
    request: Any = SimpleNamespace(url=SimpleNamespace(path="/"))
    sender = Sender(request, GATEWAY, Caller("", operator=True), None)
    return Answering(sender, body, [])


async def an_answer(result: GenerationResult, note: Note, patch: pytest.MonkeyPatch) -> None:
    made = answering(note)
    patch.setattr(made, "_results", AsyncMock(return_value=[result]))
    await made._whole()


async def a_replayed_stream(
    result: GenerationResult, note: Note, patch: pytest.MonkeyPatch
) -> None:
    chunks: Any = SimpleNamespace(tokens=lambda *_: note() or [], needs_results=False)
    await answering(note)._encoded(0, Tokens.of(result.choices[0]), chunks, lambda each: each)


async def a_job(result: GenerationResult, note: Note, patch: pytest.MonkeyPatch) -> None:
    class Watched(JobDocument):
        def model_dump_json(self, **options: Any) -> str:
            note()
            return super().model_dump_json(**options)

    urls = JobUrls(job="j", events="e")
    await jobs._answer(GATEWAY, Watched(id="j", status="succeeded", result=result, urls=urls))


async def a_response(result: GenerationResult, note: Note, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(progress, "end_if_ended", AsyncMock(return_value=result))
    patch.setattr(progress, "response_of", lambda *_: note())
    unused: Any = None
    await progress.response_now(unused, unused, GATEWAY.bodies)


async def the_end_of_a_response(
    result: GenerationResult, note: Note, patch: pytest.MonkeyPatch
) -> None:
    async def entries() -> AsyncIterator[StreamEntry]:
        yield StreamEntry("1-0", FINISHED)

    def noted(*_: object) -> Iterator[dict[str, Any]]:
        note()
        yield from ()

    patch.setattr(ResponseEvents, "end", noted)
    request = ResponseRequest(input="x", model="m")
    record = new_record(
        request, request.input, request.to_generation(request.input), job_id="j", created_at=0
    )
    job: Any = SimpleNamespace(result=AsyncMock(return_value=result))
    assert [e async for e in progress.response_events(record, job, entries(), GATEWAY.bodies)]


@pytest.mark.parametrize(
    "make", [an_answer, a_replayed_stream, a_job, a_response, the_end_of_a_response]
)
@pytest.mark.parametrize(("count", "beside"), [(1, False), (20, True)])
def test_what_a_long_result_becomes_is_made_beside_the_event_loop(
    make: Callable[..., Any], count: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    asyncio.run(make(scored(count), lambda: threads.append(threading.get_ident()), monkeypatch))
    assert [thread != threading.get_ident() for thread in threads] == [beside]


@pytest.mark.parametrize(("count", "beside"), [(1, False), (20, True)])
def test_each_long_event_of_a_response_is_written_beside_the_event_loop(
    count: int, beside: bool
) -> None:
    request = ResponseRequest(input="x", model="m", top_logprobs=20)
    generation = request.to_generation(request.input)
    record = new_record(request, request.input, generation, job_id="j", created_at=0)
    threads: list[int] = []

    def noted(text: str) -> str:
        threads.append(threading.get_ident())
        return text

    async def written() -> set[str]:
        found = set()
        events = ResponseEvents(record)
        for event in (*events.begin(), *events.end(scored(count))):
            assert json.loads(await written_event(event, GATEWAY.bodies, noted)) == event
            if threads.pop() != threading.get_ident():
                found.add(event["type"].removeprefix("response."))
        return found

    long = {"output_text.delta", "output_text.done", "content_part.done", "output_item.done"}
    assert asyncio.run(written()) == ({*long, "completed"} if beside else set())


def test_the_ids_of_tokens_count_where_an_answer_has_them() -> None:
    result = scored(20).choices[0].model_copy(update={"logprobs": None})
    assert about_bytes(result) == 20 < about_bytes(result, ids=True)


def continuing(references: list[str], items: list[Any], size: int, most: int) -> Creation:
    """A request of references, each to an item of a response of so many bytes."""
    own = SimpleNamespace(max_body_bytes=most)
    gateway: Any = SimpleNamespace(own=own, bodies=Bodies(), responses=lambda _: None)
    body = ResponseRequest.model_validate({"input": [{"id": each} for each in references]})
    creation = Creation(gateway, Caller("", operator=True), body, 10)
    creation._kept = AsyncMock(return_value=Kept(items, size))  # type: ignore[method-assign]
    return creation


def test_a_response_is_read_once_for_all_references_to_its_items() -> None:
    items = [SimpleNamespace(id=f"msg_{i}", model_dump_json=str) for i in ("a_0", "a_1", "b_0")]
    references = ["msg_a_1", "msg_b_0", "msg_a_0", "msg_a_1"]
    creation = continuing(references, items, 10, 10)
    found: Any = asyncio.run(creation._conversation())
    assert [item.id for item in found] == references
    assert creation._kept.await_args_list == [call("resp_a"), call("resp_b")]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "beside"), [(10, False), (SMALL_BYTES + 1, True)])
def test_a_long_conversation_is_counted_beside_the_event_loop(size: int, beside: bool) -> None:
    threads: list[int] = []

    def noted() -> str:
        threads.append(threading.get_ident())
        return ""

    item = SimpleNamespace(id="msg_a_0", model_dump_json=noted)
    asyncio.run(continuing(["msg_a_0"], [item], size, 10)._conversation())
    assert [thread != threading.get_ident() for thread in threads] == [beside]


def test_a_conversation_is_counted_in_bytes() -> None:
    item = SimpleNamespace(id="msg_a_0", model_dump_json=lambda: "\u00e9" * 10)
    asyncio.run(continuing(["msg_a_0"], [item], 10, 20)._conversation())
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(continuing(["msg_a_0"], [item], 10, 19)._conversation())
    (fault,) = caught.value.faults
    assert (fault.field, fault.got) == ("input.0.id", "over 19 bytes")


@pytest.mark.parametrize("count", [0, 1, 300])
def test_an_answer_in_pieces_is_the_same_json(count: int) -> None:
    content = [{"token": "ä😀", "top": [{"a": -0.5}], "bytes": [1, 2], "none": None}]
    logprobs = {"content": content * count, "refusal": None, "empty": {}}
    document = {"id": "a", "choices": [{"index": 0, "logprobs": logprobs}], "ids": [1] * count}
    assert LongJson(document).body == JSONResponse(document).body


@pytest.mark.parametrize(("count", "beside"), [(1, False), (200, True)])
def test_a_long_list_of_files_is_made_beside_the_event_loop(
    count: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    made = files._shown

    def shown(record: FileRecord) -> files.FileObject:
        threads.add(threading.get_ident())
        return made(record)

    record = FileRecord(
        id="file-1",
        owner="",
        created_at=1,
        filename="f",
        purpose="batch",
        bytes=1,
        path="p",
    )
    page = AsyncMock(return_value=([record] * count, False))
    gateway: Any = SimpleNamespace(files=SimpleNamespace(page=page), bodies=Bodies())
    monkeypatch.setattr(files, "_shown", shown)
    answer = asyncio.run(files.list_files(gateway, Caller("", operator=True)))
    assert len(json.loads(answer.body)["data"]) == count
    assert [thread != threading.get_ident() for thread in threads] == [beside]


def test_the_lines_of_a_batch_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    class Line:
        def document(self, job_id: str, end: object) -> dict[str, Any]:
            threads.append(threading.get_ident())
            return {"id": job_id, "error": end}

    async def ends(*_: object) -> AsyncIterator[tuple[Line, None]]:
        yield Line(), None

    added = AsyncMock()
    run: Any = SimpleNamespace(
        _batch=SimpleNamespace(request_counts=Counts(), status="in_progress"),
        _driver=SimpleNamespace(ends=ends, job_id=lambda _: "j"),
        _parts=SimpleNamespace(add=added, write=AsyncMock()),
        _lines=lambda _: None,
        _save=AsyncMock(),
        _finish=AsyncMock(),
    )
    asyncio.run(batch_run.BatchRun._answer(run, SimpleNamespace(lines=1)))  # type: ignore[arg-type]
    added.assert_awaited_once_with((b'{"id":"j","error":null}\n', False))
    assert threads
    assert threading.get_ident() not in threads
