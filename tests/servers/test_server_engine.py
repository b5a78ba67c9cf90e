"""A server as an engine: what it is asked, how it answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.contract import (
    Cancelled,
    ContextLengthExceeded,
    Event,
    GenerationRequest,
    InvalidRequest,
    Journal,
    LlorchError,
    ModelLoadFailed,
    Tokens,
    read_journal,
)
from llorch_worker.engine.interface import Death, EngineDied
from llorch_worker.servers import connection, server_engine
from llorch_worker.servers.answer import ChoiceSoFar
from llorch_worker.servers.bodies import texts_of
from llorch_worker.servers.connection import BUSY, AnswerCut, Refusal, ServerAway
from llorch_worker.servers.pieces import Piece, read_piece
from llorch_worker.servers.server_engine import Address, ServerEngine
from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import EngineLoader
from tests.servers.stand_in import MODEL, StandIn
from tests.waiting import wait_until

KINDS = ("vLLM", "SGLang", "llama-server", "another server")


def refuse_to_wait(reason: str) -> None:
    raise AssertionError(reason)


def load(stand_in: StandIn, **options: Any) -> ServerEngine:
    address = Address(stand_in.url, options.pop("key", None), MODEL, MODEL, **options)
    return ServerEngine.load(address, max_sequences=None, wait=refuse_to_wait)


@contextmanager
def engine_at(stand_in: StandIn, **options: Any) -> Iterator[ServerEngine]:
    engine = load(stand_in, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=KINDS)
def stand_in(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    with StandIn(request.param).running() as server:
        yield server


@pytest.fixture
def vllm() -> Iterator[StandIn]:
    with StandIn("vLLM").running() as server:
        yield server


def asked(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**({"prompt": "one two three", "max_tokens": 4} | fields))


def test_an_answer_is_streamed_and_counted_by_each_server(stand_in: StandIn) -> None:
    with engine_at(stand_in) as engine:
        generation = engine.submit(asked())
        told = [event for event in generation.events() if isinstance(event, Tokens)]
        result = generation.result()
        assert "".join(event.text for event in told) == result.text == "w0 w1 w2 w3 "
        ids = () if stand_in.kind == "another server" else (1000, 1001, 1002, 1003)
        assert result.choices[0].token_ids == tuple(i for event in told for i in event.ids) == ids
        assert result.choices[0].finish_reason == "length"
        assert result.usage.completion == 4
        assert result.usage.estimated is None
        assert engine.facts.device == stand_in.kind
        assert engine.stats().completion_tokens_total == 4


def test_a_chat_is_sent_as_a_chat(stand_in: StandIn) -> None:
    with engine_at(stand_in) as engine:
        messages = [{"role": "user", "content": "one two"}]
        result = engine.submit(asked(prompt=None, messages=messages)).result()
        assert result.text == "w0 w1 w2 w3 "
        path, body = stand_in.bodies[-1]
        if stand_in.kind == "llama-server":  # whose chats have no ids
            assert (path, body["prompt"]) == ("/completion", "one two")
        else:
            assert (path, body["messages"]) == ("/v1/chat/completions", messages)


def test_an_answer_comes_on_the_connection_of_the_question_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "KEEP_S", 60)  # on a slow machine
    with StandIn("llama-server").running() as server, engine_at(server) as engine:
        assert engine.submit(asked()).result().text == "w0 w1 w2 w3 "
        assert len(server.callers) == 2
        assert len(set(server.callers)) == 1


def test_choices_are_requests_with_seeds_of_their_own(stand_in: StandIn) -> None:
    with engine_at(stand_in) as engine:
        result = engine.submit(asked(n=3)).result()
        assert [choice.text for choice in result.choices] == ["w0 w1 w2 w3 "] * 3
        assert len({body["seed"] for _, body in stand_in.bodies}) == 3
        assert result.usage.completion == 12
        figures = engine.step_figures()
        assert (figures.prompt_tokens, figures.looked_up_tokens) == (3, 9), "once, and each time"


def test_what_a_server_does_not_count_is_counted_here_and_marked() -> None:
    with StandIn("another server", counts=False).running() as server, engine_at(server) as engine:
        usage = engine.submit(asked()).result().usage
        assert usage.completion == 4
        assert usage.estimated


def test_one_job_more_is_claimed_than_the_server_has_slots() -> None:
    with StandIn("llama-server").running() as server, engine_at(server) as engine:
        assert engine.facts.max_sequences == 3 + 1


def test_a_cancelled_job_closes_its_request(stand_in: StandIn) -> None:
    with engine_at(stand_in) as engine:
        messages = [{"role": "user", "content": "hold"}]
        generation = engine.submit(asked(prompt=None, messages=messages))
        wait_until(lambda: stand_in.open == 1)
        generation.cancel()
        with pytest.raises(Cancelled):
            generation.result()
        wait_until(lambda: stand_in.open == 0)


def test_a_job_that_is_cancelled_before_it_is_sent_ends(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        busy = threading.Event()
        engine._loop.call_soon_threadsafe(busy.wait, 60)
        generation = engine.submit(asked())
        generation.cancel()
        busy.set()
        with pytest.raises(Cancelled):
            generation.result(timeout=60)


def test_a_deadline_ends_an_answer_with_what_there_is(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        generation = engine.submit(asked(prompt="silent", max_tokens=9, deadline_s=0.5))
        result = generation.result()
        assert result.choices[0].finish_reason == "deadline"
        assert result.text in ("w0 ", "")
        wait_until(lambda: vllm.open == 0)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("cut 2", EngineDied, "closed the connection|broke off"),
        ("end 2", EngineDied, "before its end"),
        ("endless", LlorchError, "more than the 4 tokens"),
        ("huge", LlorchError, "for one answer or event"),
        ("heap", LlorchError, "for one answer"),
        ("silent", EngineDied, "sent nothing for too long"),
        ("noise", LlorchError, "no event"),
        ("odd", LlorchError, "no event"),
        ("page", LlorchError, "text/html in place of events"),
        ("error", LlorchError, "the server failed"),
        ("status 400", InvalidRequest, "HTTP 400"),
        ("status 403", LlorchError, "HTTP 403"),
        ("status 500", LlorchError, "HTTP 500"),
        ("status 502", EngineDied, "HTTP 502"),
    ],
)
def test_a_wrong_answer_costs_one_job(
    vllm: StandIn,
    prompt: str,
    error: type[LlorchError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_S", 0.0)
    with engine_at(vllm, silent_s=0.3 if prompt == "silent" else 60) as engine:
        failed = engine.submit(asked(prompt=prompt))
        with pytest.raises(error, match=words) as raised:
            failed.result()
        assert isinstance(raised.value, InvalidRequest) or raised.value.retriable
        assert not isinstance(raised.value, EngineDied) or raised.value.death.lives
        assert prompt not in str(raised.value), "the server quoted it"
        assert engine.healthy
        if prompt != "silent":  # a busy machine may be silent for as long
            assert engine.submit(asked()).result().text == "w0 w1 w2 w3 "


def test_a_prompt_may_take_its_time_before_the_first_token(vllm: StandIn) -> None:
    with engine_at(vllm, silent_s=0.5) as engine:
        assert engine.submit(asked(prompt="late", max_tokens=1)).result().text == "w0 "


def test_a_server_that_vanishes_before_its_first_token_is_noticed_by_the_system(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def keep(*args: Any) -> socket.socket:
        made.append(probed(*args))
        return made[-1]

    probed = connection._probed_socket
    monkeypatch.setattr(connection, "_probed_socket", keep)
    with engine_at(vllm) as engine:
        generation = engine.submit(asked(prompt="hold"))
        wait_until(lambda: vllm.open == 1)
        held = [each for each in made if each.fileno() >= 0]
        assert held
        for each in held:
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in connection.KEEP_ALIVE:
                if option := getattr(socket, name, None):
                    assert each.getsockopt(socket.IPPROTO_TCP, option) == value
        generation.cancel()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("/v1", {"model": "toyy"}, "serves toy, and not toyy"),
        ("/v1", {"key": "wrong"}, "refuses the key"),
        ("/nowhere/v1", {}, "HTTP 404 at /v1/models"),
    ],
)
def test_a_server_that_does_not_suit_is_told_in_a_sentence(
    url: str, options: dict[str, str], words: str
) -> None:
    with StandIn("vLLM", key="right").running() as server:
        given = {"key": "right", "model": MODEL} | options
        place = server.url.removesuffix("/v1") + url
        address = Address(place, given["key"], given["model"], MODEL)
        assert "right" not in repr(address)
        with pytest.raises(ModelLoadFailed, match=words):
            ServerEngine.load(address, max_sequences=None, wait=refuse_to_wait)


def test_a_job_goes_on_after_the_ids_of_its_journal() -> None:
    for kind in ("vLLM", "SGLang", "llama-server"):
        with StandIn(kind).running() as server, engine_at(server) as engine:
            first = engine.submit(asked(max_tokens=2))
            journal = read_journal(e for e in first.events() if e.type in ("started", "tokens"))
            assert engine.continues(asked(), journal)
            second = engine.submit(asked(), journal=journal)
            told = [event for event in second.events() if isinstance(event, Tokens)]
            assert [event.index for event in told] == [2, 3]
            result = second.result()
            assert result.text == "w0 w1 w2 w3 "
            assert result.choices[0].token_ids == (1000, 1001, 1002, 1003)
            assert (result.usage.prompt, result.usage.completion) == (
                first.result().usage.prompt,
                4,
            )


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_a_job_that_goes_on_asks_for_the_rest_of_its_least_tokens(kind: str) -> None:
    with StandIn(kind).running() as server, engine_at(server) as engine:
        first = engine.submit(asked(max_tokens=2))
        journal = read_journal(e for e in first.events() if e.type in ("started", "tokens"))
        for least, left in ((4, 2), (1, 0)):
            engine.submit(asked(min_tokens=least), journal=journal).result()
            _, body = server.bodies[-1]
            assert (body["min_tokens"], body["max_tokens"]) == (left, 2)


def test_a_job_that_cannot_go_on_as_it_would_have_begins_again(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        generation = engine.submit(asked(max_tokens=2))
        journal = read_journal(e for e in generation.events() if e.type in ("started", "tokens"))
        for fields in (
            {"n": 2},
            {"frequency_penalty": 1},
            {"response_format": {"type": "json_object"}},
        ):
            assert not engine.continues(asked(**fields), journal)
        assert not engine.continues(asked(), Journal())


def test_an_engine_leaves_no_descriptor_and_no_thread(vllm: StandIn) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) + threading.active_count()

    load(vllm).close()
    wait_until(lambda: vllm.open == 0)
    before = held()
    for number in range(6):
        engine = load(vllm)
        engine.submit(asked(max_tokens=1)).result()
        if number % 2:
            engine.kill("server", "for a test")
            wait_until(lambda: not engine.healthy)  # noqa: B023 - it is waited for here
        else:
            engine.close()
    wait_until(lambda: held() <= before + 2)


def test_a_server_that_falls_ill_ends_the_engine_and_blames_no_job(vllm: StandIn) -> None:
    deaths: list[Death] = []
    engine = load(vllm)
    engine.on_death(deaths.append)
    generations = [engine.submit(asked(prompt="hold")) for _ in range(2)]
    vllm.well = False
    for generation in generations:
        with pytest.raises(EngineDied, match="HTTP 503"):
            generation.result()
    assert [death.suspects for death in deaths] == [()]
    assert not engine.healthy
    with pytest.raises(EngineDied):
        engine.submit(asked())
    engine.close()


@pytest.mark.parametrize("prompt", ["error", "status 500"])
@pytest.mark.parametrize("held", [0, 1])
def test_a_server_whose_engine_has_died_fails_no_job(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, prompt: str, held: int
) -> None:
    """vLLM's API outlives its engine for a while, and answers that each request failed."""
    monkeypatch.setattr(server_engine, "LOOK_S", 3600.0)
    deaths: list[Death] = []
    engine = load(vllm)
    engine.on_death(deaths.append)
    others = [engine.submit(asked(prompt="hold")) for _ in range(held)]
    wait_until(lambda: vllm.open == held)
    vllm.well = False
    for generation in (engine.submit(asked(prompt=prompt), job_id="last"), *others):
        with pytest.raises(EngineDied, match="HTTP 503"):
            generation.result(timeout=60)
    assert [(death.lives, death.suspects) for death in deaths] == [
        (False, () if held else ("last",))
    ]
    engine.close()


def test_answers_that_a_server_gives_up_as_it_stops_go_on_at_the_next(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "LOOK_S", 3600.0)
    deaths: list[Death] = []
    request = asked(prompt="slow 50", max_tokens=60)
    with StandIn("vLLM").running() as stopped:
        engine = load(stopped)
        engine.on_death(deaths.append)
        told: list[list[Event]] = [[], []]
        given_up = [engine.submit(request, on_event=events.append) for events in told]
        wait_until(lambda: all(len(events) > 2 for events in told))
        stopped.stop()
        for generation in given_up:
            with pytest.raises(EngineDied):
                generation.result(timeout=60)
        engine.close()
    assert [(death.lives, death.suspects) for death in deaths] == [(False, ())]
    with engine_at(vllm) as following:
        resumed = []
        for events in told:
            journal = read_journal(e for e in events if e.type in ("started", "tokens"))
            assert following.continues(request, journal)
            resumed.append(following.submit(request, journal=journal))
        for generation in resumed:
            result = generation.result(timeout=60)
            assert result.choices[0].token_ids == tuple(range(1000, 1060))


def test_an_answer_that_has_ended_is_whole_also_if_its_connection_ends_before_its_count(
    vllm: StandIn,
) -> None:
    with engine_at(vllm) as engine:
        result = engine.submit(asked(prompt="torn")).result()
        assert result.text == "w0 w1 w2 w3 "
        assert result.choices[0].finish_reason == "length"
        assert (result.usage.completion, result.usage.estimated) == (4, True)


def test_a_proxy_that_reaches_no_server_is_asked_again_and_then_ends_the_engine_for_no_jobs_fault(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_PAUSES_S", (0.01, 0.02))
    deaths: list[Death] = []
    engine = load(vllm)
    engine.on_death(deaths.append)
    vllm.unreached = 3
    assert engine.submit(asked(max_tokens=3073)).result(timeout=60).usage.completion == 3073
    assert vllm.unreached == 0
    assert len(vllm.callers) == 2, "the prompt was counted all the same"
    monkeypatch.setattr(server_engine, "BUSY_S", 0.1)
    vllm.unreached = 10**6
    for generation in [engine.submit(asked()) for _ in range(2)]:
        with pytest.raises(EngineDied, match="HTTP 502"):
            generation.result(timeout=60)
    assert [(death.lives, death.suspects) for death in deaths] == [(False, ())]
    engine.close()


def test_a_choice_waits_for_room_as_long_as_another_of_its_job_has_it(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_PAUSES_S", (0.01, 0.02))
    vllm.room = 0
    with engine_at(vllm) as engine:
        generation = engine.submit(asked(prompt="slow 20", n=4))
        wait_until(lambda: len(vllm.bodies) >= 4)
        vllm.room = 2
        result = generation.result(timeout=60)
        assert [choice.text for choice in result.choices] == ["w0 w1 w2 w3 "] * 4
    monkeypatch.setattr(server_engine, "BUSY_S", -1.0)
    refusals = [Refusal(503, "busy") for _ in range(5)]

    async def ask() -> str:
        if refusals:
            raise refusals.pop()
        return "room"

    assert asyncio.run(server_engine._patiently(ask, BUSY, is_served=lambda: True)) == "room"


def test_a_job_goes_on_also_if_the_server_was_busy_when_it_was_asked_for_that(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_PAUSES_S", (0.01, 0.02))
    with engine_at(vllm) as engine:
        first = engine.submit(asked(max_tokens=2))
        journal = read_journal(e for e in first.events() if e.type in ("started", "tokens"))
        vllm.unreached = 3
        assert engine.continues(asked(), journal)
        assert vllm.unreached == 0
        monkeypatch.setattr(server_engine, "BUSY_S", 0.0)
        vllm.unreached = 1
        with pytest.raises(EngineDied) as caught:
            engine.continues(asked(), journal)
        assert (caught.value.death.lives, caught.value.death.suspects) == (True, ())
        assert engine.healthy


def test_a_busy_server_is_away_once_it_has_answered_no_look_for_so_long(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def cut(*_: object, **__: object) -> None:
        nonlocal looks
        looks += 1
        raise AnswerCut("cut")

    monkeypatch.setattr(server_engine, "LOOK_S", 0.01)
    with engine_at(vllm) as engine:
        monkeypatch.setattr(engine._asking.connection, "ask", cut)
        wait_until(lambda: looks > 20 or not engine.healthy)
        assert engine.healthy, "however many looks those were"
        monkeypatch.setattr(server_engine, "HUNG_S", 0.1)
        wait_until(lambda: not engine.healthy)


def test_a_server_without_a_health_page_is_not_away(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def refuse(*_: object, **__: object) -> None:
        nonlocal looks
        looks += 1
        raise Refusal(404, "no such page")

    monkeypatch.setattr(server_engine, "LOOK_S", 0.01)
    with engine_at(vllm) as engine:
        monkeypatch.setattr(engine._asking.connection, "ask", refuse)
        monkeypatch.setattr(server_engine, "HUNG_S", 0.0)
        wait_until(lambda: looks > 9 or not engine.healthy)
        assert engine.healthy


@pytest.mark.parametrize(("asked_for", "claimed"), [(5, 5), (None, 4)])
def test_a_worker_claims_as_many_jobs_as_it_was_asked_to(
    asked_for: int | None, claimed: int
) -> None:
    """By LLORCH_MAX_SEQUENCES, or by Celery's -c; else by the server's three slots."""
    with StandIn("llama-server").running() as server:
        loader = EngineLoader(
            Settings(engine_url=server.url, model=MODEL),
            Assignment("server"),
            engine_class="",
            max_sequences=asked_for,
            report=lambda _: None,
        )
        engine = loader.load()
        assert engine.facts.max_sequences == claimed
        engine.close()


def test_a_server_is_looked_at_also_after_a_defect(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ServerAway("it is away"), RuntimeError("a defect")]

    async def fail(*_: object, **__: object) -> None:
        raise errors.pop()

    monkeypatch.setattr(server_engine, "LOOK_S", 0.01)
    with engine_at(vllm) as engine:
        monkeypatch.setattr(engine._asking.connection, "ask", fail)
        wait_until(lambda: not engine.healthy)


def test_a_server_that_no_longer_takes_the_key_ends_the_engine(vllm: StandIn) -> None:
    engine = load(vllm)
    vllm.key = "another"
    generation = engine.submit(asked())
    with pytest.raises(EngineDied, match="refuses the key"):
        generation.result()
    assert not engine.healthy
    engine.close()


def test_a_server_without_tls_is_told_in_a_sentence(vllm: StandIn) -> None:
    address = Address(vllm.url.replace("http:", "https:"), None, MODEL, MODEL)
    with pytest.raises(ModelLoadFailed, match="no TLS"):
        ServerEngine.load(address, max_sequences=None, wait=refuse_to_wait)


def test_a_suspect_is_alone_at_the_server_until_its_first_token(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        held = engine.submit(asked(prompt="hold"))
        wait_until(lambda: vllm.open == 1)
        suspect = engine.submit(asked(prompt="suspect"), suspect=True)
        other = engine.submit(asked(prompt="other"))
        assert [body["prompt"] for _, body in vllm.bodies] == ["hold"]
        held.cancel()
        assert suspect.result().text == other.result().text == "w0 w1 w2 w3 "
        assert [body["prompt"] for _, body in vllm.bodies] == ["hold", "suspect", "other"]


def test_a_suspect_that_is_cancelled_as_it_waits_holds_nobody_up(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        held = engine.submit(asked(prompt="hold"))
        wait_until(lambda: vllm.open == 1)
        suspect = engine.submit(asked(), suspect=True)
        other = engine.submit(asked())
        suspect.cancel()
        assert other.result(timeout=60).text == "w0 w1 w2 w3 "
        held.cancel()


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
@pytest.mark.parametrize("most", [None, 10**6])
def test_a_text_whose_maximum_is_cut_gets_what_the_context_holds(
    kind: str, most: int | None
) -> None:
    with StandIn(kind).running() as server, engine_at(server) as engine:
        result = engine.submit(asked(max_tokens=most, cut_max_tokens=True)).result()
        assert result.usage.prompt + result.usage.completion == engine.facts.max_context


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "one two three"},
        {"prompt": None, "prompt_token_ids": [1, 2, 3]},
        {"prompt": None, "messages": [{"role": "user", "content": "one two three"}]},
    ],
)
@pytest.mark.parametrize("kind", ["vLLM", "llama-server", "SGLang"])
def test_what_does_not_fit_is_refused_also_where_the_server_would_end_it_early(
    kind: str, prompt: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.servers.stand_in.CONTEXT", 40)
    with StandIn(kind).running() as server, engine_at(server) as engine:
        room = engine.facts.max_context - 3
        whole = engine.submit(asked(max_tokens=room, **prompt)).result()
        assert whole.usage.completion == room
        with pytest.raises(ContextLengthExceeded) as raised:
            engine.submit(asked(max_tokens=room + 1, **prompt)).result()
        assert "one" not in str(raised.value)
        assert len(server.bodies) == 1 + (kind == "SGLang"), "the others refuse it themselves"


def test_what_surely_fits_is_asked_for_without_a_question(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        engine.submit(asked(max_tokens=20)).result()
        assert len(vllm.callers) == 1


def test_a_text_without_a_maximum_is_refused_where_no_context_is_known() -> None:
    with StandIn("another server").running() as server, engine_at(server) as engine:
        generation = engine.submit(asked(max_tokens=None, cut_max_tokens=True))
        with pytest.raises(InvalidRequest, match="max_tokens: must be given"):
            generation.result()


def test_an_error_quotes_no_short_lines_of_a_prompt() -> None:
    prompt = "a1\nb2\nc3\nd4\ne5"
    refusal = Refusal(400, {"message": f"wrong: {prompt}"})
    assert refusal.shown((prompt,)) == "HTTP 400: a message of 25 characters"


def test_a_prompt_that_is_too_long_is_refused_as_ours_would_be(vllm: StandIn) -> None:
    with engine_at(vllm) as engine, pytest.raises(InvalidRequest) as raised:
        engine.submit(asked(prompt="status 400 maximum context length is")).result()
    assert isinstance(raised.value, ContextLengthExceeded)


@pytest.mark.parametrize(("status", "code"), [(404, "INVALID_REQUEST"), (403, "INTERNAL")])
def test_a_server_that_lacks_a_way_to_ask_has_not_gone(
    vllm: StandIn, status: int, code: str
) -> None:
    with engine_at(vllm) as engine:
        neighbour = engine.submit(asked(prompt="slow 20", max_tokens=20))
        with pytest.raises(LlorchError) as caught:
            engine.submit(asked(prompt=f"status {status}")).result(timeout=60)
        assert caught.value.code == code
        assert f"HTTP {status}" in caught.value.message
        assert neighbour.result(timeout=60).usage.completion == 20


def test_a_server_lives_whatever_it_says_of_its_health(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "LOOK_S", 0.02)
    vllm.health = "OK"
    with engine_at(vllm) as engine:
        assert engine.submit(asked(prompt="slow 50", max_tokens=10)).result().usage.completion == 10
        assert engine.healthy


def test_only_a_server_whose_health_is_known_to_cost_nothing_is_asked_for_it(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its own, a LiteLLM proxy sends a request to each of its models."""
    monkeypatch.setattr(server_engine, "LOOK_S", 0.01)
    page = "/v1/models" if stand_in.kind == "another server" else "/health"
    with engine_at(stand_in) as engine:
        chat = [{"role": "user", "content": "cut 2"}]
        with pytest.raises(EngineDied):
            engine.submit(asked(prompt=None, messages=chat)).result(timeout=60)
        seen = len(stand_in.looks)
        wait_until(lambda: stand_in.looks[seen:].count(page) > 3)
        assert engine.healthy
    assert ("/health" in stand_in.looks) == (page == "/health")


def test_an_ill_server_is_waited_for(vllm: StandIn) -> None:
    vllm.well = False
    with pytest.raises(AssertionError, match=r"HTTP 503.* at /health"):
        load(vllm)


def test_odd_words_of_a_model_are_ignored(vllm: StandIn) -> None:
    vllm.card = {"meta": "x", "aliases": 5, "max_model_len": 10**30}
    with engine_at(vllm) as engine:
        assert engine.facts.max_context > 0


@pytest.mark.parametrize(("parent", "context"), [("base", 512), ("gone", None), (None, None)])
def test_an_adapter_has_the_context_of_the_model_that_it_belongs_to(
    vllm: StandIn, parent: str | None, context: int | None
) -> None:
    vllm.card = {"root": "/adapters/x", "parent": parent, "max_model_len": None}
    vllm.others = [{"owned_by": "vllm"}, {"id": "base", "max_model_len": 512}]
    with engine_at(vllm) as engine:
        assert engine.facts.max_context == (context or server_engine.UNKNOWN_CONTEXT)


@pytest.mark.parametrize("count", [-5, 10**30, None])
def test_odd_counts_leave_a_result_that_can_be_added_up(vllm: StandIn, count: int | None) -> None:
    vllm.counted = {"prompt_tokens": count, "completion_tokens": count}
    with engine_at(vllm) as engine:
        usage = engine.submit(asked()).result(timeout=60).usage
        assert 0 <= usage.prompt <= 2**31
        assert 0 <= usage.completion <= 2**31


def test_a_busy_server_is_asked_again_for_a_while(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_PAUSES_S", (0.01, 0.02))
    vllm.busy = 3
    with engine_at(vllm) as engine:
        assert engine.submit(asked()).result(timeout=60).text == "w0 w1 w2 w3 "
        assert len(vllm.bodies) == 4
        vllm.busy = 10**6
        waiting = engine.submit(asked())
        wait_until(lambda: len(vllm.bodies) > 6)
        waiting.cancel()
        with pytest.raises(Cancelled):
            waiting.result(timeout=60)
        monkeypatch.setattr(server_engine, "BUSY_S", 0.1)
        with pytest.raises(EngineDied, match="HTTP 503") as caught:
            engine.submit(asked()).result(timeout=60)
        assert (caught.value.death.lives, caught.value.death.suspects) == (True, ())
        assert engine.healthy


def test_an_answer_that_a_filter_ends_keeps_its_text_and_says_so(vllm: StandIn) -> None:
    with engine_at(vllm) as engine:
        (choice,) = engine.submit(asked(prompt="filter")).result().choices
        assert (choice.text, choice.finish_reason) == ("w0 w1 w2 w3 ", "content_filter")


NO_END = [{"index": 0, "text": "", "token_ids": [], "finish_reason": said} for said in ("", "null")]
OTHER_CHOICE = {"index": 1, "text": "no", "token_ids": [7], "finish_reason": "stop"}


@pytest.mark.parametrize(
    "said",
    [
        b"data:\n\n",
        b"data: \r\n\r\n",
        b": a comment\n\n",
        b"event: token\nid: 3\nretry: 10\n\n",
        b'data: {"choices": null}\n\n',
        b'data: {"choices": [], "error": {}}\n\n',
        b'data: {"choices": [], "error": null}\n\n',
        b'data: {"choices": [null]}\n\n',
        b'data: {"choices": [{"index": null, "delta": null}]}\n\n',
        b'data: {"usage": {"prompt_tokens": 3}}\n\n',
        f"data: {json.dumps({'choices': NO_END[:1]})}\n\n".encode(),
        f"data: {json.dumps({'choices': NO_END[1:]})}\n\n".encode(),
        f"data: {json.dumps({'choices': [OTHER_CHOICE]})}\n\n".encode(),
        f"data: {json.dumps({'choices': [OTHER_CHOICE, {'index': 0, 'text': ''}]})}\n\n".encode(),
    ],
)
def test_events_that_say_nothing_of_the_answer_are_harmless(vllm: StandIn, said: bytes) -> None:
    vllm.said_between = said
    with engine_at(vllm) as engine:
        (choice,) = engine.submit(asked()).result().choices
        assert (choice.text, choice.finish_reason) == ("w0 w1 w2 w3 ", "length")
        assert choice.token_ids == (1000, 1001, 1002, 1003)


def test_tokens_without_a_text_are_counted() -> None:
    with StandIn("vLLM", counts=False).running() as server, engine_at(server) as engine:
        result = engine.submit(asked(prompt="mute")).result()
        assert result.text == ""
        assert result.choices[0].token_ids == (1000, 1001, 1002, 1003)
        assert (result.usage.completion, result.usage.estimated) == (4, True)
        assert engine.stats().completion_tokens_total == 4


@pytest.mark.parametrize("prompt", ["cut 2", "status 403"])
def test_a_server_that_is_busy_when_it_is_asked_whether_it_lives_is_asked_again(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr(server_engine, "BUSY_PAUSES_S", (0.01, 0.02))
    with engine_at(vllm) as engine:
        vllm.busy_models = 3
        with pytest.raises(LlorchError) as caught:
            engine.submit(asked(prompt=prompt)).result(timeout=60)
        if prompt == "cut 2":
            assert isinstance(caught.value, EngineDied)
            assert caught.value.death.lives
        else:
            assert "HTTP 403" in caught.value.message
        assert vllm.busy_models == 0
        assert engine.healthy


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_too_busy_to_answer_whether_it_lives_is_asked_again_for_so_long(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(server_engine, "LOOK_S", 0.01)
    monkeypatch.setattr(server_engine, "HUNG_S", 3600.0 if answers else 0.1)
    asked_for: list[str] = []
    with engine_at(vllm) as engine:
        real = engine._asking.connection.ask

        async def ask(path: str, *args: Any, **options: Any) -> Any:
            asked_for.append(path)
            if path == "/v1/models" and not (answers and asked_for.count(path) > 3):
                raise AnswerCut("cut")
            return await real(path, *args, **options)

        monkeypatch.setattr(engine._asking.connection, "ask", ask)
        with pytest.raises(EngineDied) as caught:
            engine.submit(asked(prompt="cut 2")).result(timeout=60)
        assert caught.value.death.lives == engine.healthy == answers
    assert asked_for.count("/v1/models") == 4 or not answers


def test_a_job_that_is_not_wanted_stops_asking_whether_it_can_go_on(vllm: StandIn) -> None:
    with engine_at(vllm) as engine, ThreadPoolExecutor(1) as pool:
        first = engine.submit(asked(max_tokens=2))
        journal = read_journal(e for e in first.events() if e.type in ("started", "tokens"))
        vllm.detokenizes.clear()
        unwanted = threading.Event()
        asks = pool.submit(engine.continues, asked(), journal, lambda: not unwanted.is_set())
        wait_until(lambda: vllm.questions == 1)
        unwanted.set()
        assert asks.result(timeout=30)  # before the question has lasted for too long


def test_jobs_that_were_there_at_two_ends_are_suspects_however_far_apart() -> None:
    deaths: list[Death] = []
    with StandIn("another server").running() as server:
        address = Address(server.url, None, MODEL, MODEL, last_hands=frozenset(("a", "b", "gone")))
        engine = ServerEngine.load(address, max_sequences=None, wait=refuse_to_wait)
        engine.on_death(deaths.append)
        held = [engine.submit(asked(prompt="hold"), job_id=name) for name in ("a", "b", "new")]
        wait_until(lambda: server.open == 3)
    for generation in held:
        with pytest.raises(EngineDied):
            generation.result(timeout=60)
    assert [sorted(death.suspects) for death in deaths] == [["a", "b"]]
    assert address.last_hands == {"a", "b", "new"}
    engine.close()


CHAT = {
    "messages": [
        {"role": "system", "content": "the rules of the house"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "function": {
                        "name": "find",
                        "arguments": '{"who": "Ada Lovelace", "in": "Oslo"}',
                    },
                }
            ],
        },
        {"role": "tool", "content": "she is at home", "tool_call_id": "c"},
        {"role": "user", "content": "and where is that?"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "find_person",
                "description": "finds anybody by name",
                "parameters": {"type": "object", "properties": {"birthplace": {"enum": ["Paris"]}}},
            },
        }
    ],
    "stop": ["The End."],
    "chat_template_kwargs": {"persona": "an old sailor"},
}
WRITTEN = (
    *("the rules of the house", "Ada Lovelace", "Oslo", "she is at home", "and where is that?"),
    *("find_person", "finds anybody by name", "birthplace", "Paris", "The End.", "an old sailor"),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_an_error_quotes_nothing_that_the_sender_has_written(text: str) -> None:
    request = asked(prompt=None, **CHAT)
    assert text not in Refusal(400, {"message": f"wrong: {text}"}).shown(texts_of(request))
    said = "temperature of an object must be a number of type float"
    assert Refusal(400, {"message": said}).shown(texts_of(request)) == f"HTTP 400: {said}"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": None, "prompt_token_ids": [15496, 11, 995]}, "15496, 11, 995"),
        ({"structured_outputs": {"grammar": 'root ::= "a secret"'}}, 'root ::= "a secret"'),
        ({"prompt": "a secret " * 100_000}, "a secret"),
    ],
)
def test_an_error_quotes_no_ids_no_grammar_and_nothing_of_a_long_text(
    fields: dict[str, Any], text: str
) -> None:
    refusal = Refusal(400, {"message": f"wrong: {text}"})
    assert text not in refusal.shown(texts_of(asked(**fields)))


def call_parts(*parts: tuple[int | None, str | None, str]) -> Iterator[Piece]:
    """Of calls of functions that have the name of their id; the events of a server."""
    for index, id, arguments in parts:
        part = {"index": index, "id": id, "function": {"name": id, "arguments": arguments}}
        yield read_piece(json.dumps({"choices": [{"delta": {"tool_calls": [part]}}]}).encode())


A, B = ("a", '{"x": 1}'), ("b", '{"x": 2}')


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        ([(0, "a", '{"x": 1}'), (0, "b", '{"x": 2}')], [A, B]),
        ([(None, "a", '{"x": 1}'), (None, "b", '{"x": 2}')], [A, B]),
        ([(0, "a", '{"x"'), (0, "a", ": 1}"), (0, "b", '{"x"'), (0, None, ": 2}")], [A, B]),
        ([(0, "a", '{"x"'), (0, "", ": 1}"), (1, "b", '{"x"'), (1, None, ": 2}")], [A, B]),
        ([(0, "a", '{"x": 1}'), (0, "b", '{"x": 2}'), (1, "c", "{}")], [A, B, ("c", "{}")]),
    ],
)
def test_calls_that_a_server_gives_one_index_or_none_are_told_by_their_ids(
    parts: list[tuple[int | None, str | None, str]], calls: list[tuple[str, str]]
) -> None:
    choice = ChoiceSoFar(0, None, "job")
    told = [part for piece in call_parts(*parts) for part in choice.take(piece).calls]
    assert [part.id for part in told if part.id] == [id for id, _ in calls]
    assert {part.index for part in told} == set(range(len(calls)))
    found = choice.result("stop").tool_calls
    assert [(call.id, call.function.arguments) for call in found] == calls
    assert [call.function.name for call in found] == [id for id, _ in calls]


def test_a_call_whose_parts_have_an_id_each_stays_one() -> None:
    choice = ChoiceSoFar(0, None, "job")
    for id, function in (
        ("a", {"name": "f", "arguments": '{"x"'}),
        ("b", {"name": None, "arguments": ": 1}"}),
    ):
        part = {"index": 0, "id": id, "function": function}
        choice.take(
            read_piece(json.dumps({"choices": [{"delta": {"tool_calls": [part]}}]}).encode())
        )
    [call] = choice.result("stop").tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("a", "f", '{"x": 1}')


def test_when_an_answer_may_end_is_told_from_its_tokens() -> None:
    choice = ChoiceSoFar(0, None, "job")
    ends = []
    for second in range(1, 6):
        choice.take(Piece(text="x"))
        ends.append(choice.ends_s(asked(max_tokens=20), float(second)))
    assert ends == [1, 2, 3, 20, 20], "few tokens say nothing of the rest"
    unbounded = asked(max_tokens=None, cut_max_tokens=True)
    assert choice.ends_s(unbounded, 6.0) == float("inf")
