"""A job interrupted anywhere and resumed elsewhere equals an uninterrupted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import (
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    Started,
    Tokens,
    decode_event,
    encode_event,
    read_journal,
)
from llorch_worker.engine import Engine
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import continuation
from tests.told import merged

PROMPT = "Once upon a time"
PROMPT_IDS = [1, 7, 8, 9]


class ScriptedModel:
    """The real model, but after ``PROMPT_IDS`` the next token is always the script's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.script: list[int] = []

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(batch, cache)
        for row, position in enumerate(batch.positions[batch.logits_rows].tolist()):
            logits[row, self.script[position + 1 - len(PROMPT_IDS)]] += 1e3
        return logits


@pytest.fixture(scope="module")
def scripted(loaded: Any) -> ScriptedModel:
    return ScriptedModel(loaded.model)


@pytest.fixture(scope="module")
def scripted_engines(loaded: Any, scripted: ScriptedModel) -> Iterator[tuple[Engine, Engine]]:
    with loaded.engine(model=scripted) as first, loaded.engine(model=scripted) as second:
        yield first, second
        second.check_integrity()


@pytest.fixture(scope="module")
def other_engine(loaded: Any) -> Iterator[Engine]:
    """The worker that takes over: small steps, so that a long prefill comes in chunks."""
    with loaded.engine(max_step_tokens=24) as engine:
        yield engine
        engine.check_integrity()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


def over_the_wire(events: list[Event]) -> list[Event]:
    return [decode_event(encode_event(event)) for event in events]


def same(result: GenerationResult, whole: GenerationResult) -> None:
    """Compares all but timings, worker, attempt and cached tokens; logprobs up to rounding."""
    for name in ("prompt", "completion"):
        assert getattr(result.usage, name) == getattr(whole.usage, name)
    assert (result.text, result.seed) == (whole.text, whole.seed)
    for choice, expected in zip(result.choices, whole.choices, strict=True):
        bare = {"logprobs": None}
        assert choice.model_copy(update=bare) == expected.model_copy(update=bare)
        assert (choice.logprobs is None) == (expected.logprobs is None)
        for entry, other in zip(choice.logprobs or (), expected.logprobs or (), strict=True):
            assert entry.id == other.id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.id for top in entry.top] == [top.id for top in other.top]


def shown(events: list[Event]) -> dict[int, tuple[tuple[int, ...], str]]:
    """Ids and text that readers saw; fails if a token is missing or repeated."""
    choices = read_journal(events).choices
    return {number: (choice.token_ids, choice.text) for number, choice in choices.items()}


def cut_everywhere(
    first: Engine, second: Engine, request: GenerationRequest, job_id: str = "job"
) -> GenerationResult:
    """Runs ``request``, resumes it from its events up to each one, compares the results."""
    generation = first.submit(request, job_id=job_id)
    events = list(generation.events())
    whole = generation.result(timeout=60)
    cuts = [over_the_wire(events[:end]) for end in range(len(events) + 1)]
    resumed = []
    for cut in cuts:
        journal = read_journal(merged(cut))
        assert journal == read_journal(cut)
        resumed.append(second.submit(request, job_id=job_id, attempt=2, journal=journal))
    for cut, generation in zip(cuts, resumed, strict=True):
        result = generation.result(timeout=60)
        same(result, whole)
        assert result.attempts == 2
        fresh = list(generation.events())
        assert isinstance(fresh[0], Started)
        assert (fresh[0].attempt, fresh[0].cached_tokens) == (2, result.usage.cached)
        assert isinstance(fresh[-1], Finished)
        assert fresh[-1].usage == result.usage
        assert shown([*cut, *fresh]) == shown(events)
        assert {n: text for n, (_, text) in shown([*cut, *fresh]).items()} == {
            choice.index: choice.text for choice in whole.choices
        }
    return whole


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.1, "top_p": 0.95, "seed": 4711},
    "seed from the job's id": {"temperature": 1.0},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "min_tokens": {"temperature": 1.0, "seed": 3, "min_tokens": 15, "stop": ["a"]},
    "logprobs": {"temperature": 0.7, "seed": 5, "logprobs": 3},
    "three choices": {"temperature": 1.2, "seed": 6, "n": 3, "logprobs": 0},
    "bias": {"temperature": 1.0, "seed": 7, "logit_bias": {10: 4.0, 20: -5.0}},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_a_job_interrupted_after_any_event_equals_an_uninterrupted_one(
    engine: Engine, other_engine: Engine, fields: dict[str, Any]
) -> None:
    request = GenerationRequest(
        **{"prompt": PROMPT, "max_tokens": 25, "ignore_eos": True, **fields}
    )
    cut_everywhere(engine, other_engine, request)


def test_an_interrupted_stop_string_still_stops(engine: Engine, other_engine: Engine) -> None:
    plain = GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=25, ignore_eos=True)
    text = engine.submit(plain).result(timeout=60).text
    for stops in [(text[20:34],), (text[30:31],), (text[18:26] + "#", text[22:40])]:
        request = plain.model_copy(update={"stop": stops})
        whole = cut_everywhere(engine, other_engine, request)
        assert whole.choices[0].finish_reason == "stop"
    # Held back to the very end, and no stop string after all.
    request = plain.model_copy(update={"stop": (text[-6:] + "#",)})
    assert cut_everywhere(engine, other_engine, request).text == text


def test_only_unfinished_choices_are_resumed(engine: Engine, other_engine: Engine) -> None:
    request = GenerationRequest(
        prompt=PROMPT, seed=11, temperature=1.4, n=4, max_tokens=25, stop=["a", "the"]
    )
    whole = cut_everywhere(engine, other_engine, request)
    assert len({len(choice.token_ids) for choice in whole.choices}) > 1


EMOJI = "é\N{SNOWMAN}\U0001f600".encode()
SCRIPTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "whole characters": (EMOJI * 2, {}),
    "a broken character": (b"\xf0\x9f" + EMOJI + b"\xe2\x98", {}),
    "a stop string of one character": (EMOJI * 2, {"stop": ["\U0001f600"]}),
    "a stop string that may begin": (EMOJI * 2, {"stop": ["\N{SNOWMAN}x", "\U0001f600é#"]}),
    "a broken end and a stop string": (EMOJI + b"\xf0\x9f", {"stop": ["\U0001f600\ufffd"]}),
}


@pytest.mark.parametrize(("data", "fields"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_character_interrupted_between_its_bytes_comes_whole(
    scripted: ScriptedModel,
    scripted_engines: tuple[Engine, Engine],
    data: bytes,
    fields: dict[str, Any],
) -> None:
    first, second = scripted_engines
    token_bytes = first.tokenizer.decoding_table.token_bytes
    scripted.script = [token_bytes.index(bytes([byte])) for byte in data]
    request = GenerationRequest(
        prompt_token_ids=PROMPT_IDS, temperature=0, max_tokens=len(data), **fields
    )
    whole = cut_everywhere(first, second, request)
    if not fields:
        assert whole.text == continuation(first.tokenizer, scripted.script)
        assert "é\N{SNOWMAN}\U0001f600" in whole.text


def test_an_end_of_sequence_also_ends_the_job_on_the_next_worker(
    scripted: ScriptedModel, scripted_engines: tuple[Engine, Engine]
) -> None:
    first, second = scripted_engines
    (eos,) = first.tokenizer.eos_token_ids
    byte = first.tokenizer.decoding_table.token_bytes.index(b"\xe2")
    scripted.script = [300, byte, 301, eos, eos, 302, 303, eos]
    request = GenerationRequest(
        prompt_token_ids=PROMPT_IDS, temperature=0, max_tokens=8, min_tokens=1
    )
    assert len(cut_everywhere(first, second, request).choices[0].token_ids) == 4
    stop = request.model_copy(update={"stop_token_ids": (302,), "ignore_eos": True})
    assert len(cut_everywhere(first, second, stop).choices[0].token_ids) == 6
    ignoring = request.model_copy(update={"ignore_eos": True})
    whole = cut_everywhere(first, second, ignoring)
    assert (len(whole.choices[0].token_ids), whole.choices[0].finish_reason) == (8, "length")


def test_a_job_whose_choices_are_all_complete_ends_without_a_step(
    engine: Engine, make_engine: Callable[..., Engine]
) -> None:
    request = GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=6, n=2, ignore_eos=True)
    first = engine.submit(request)
    events = list(first.events())
    fresh = make_engine()
    for cut in (events[:-1], events):
        again = fresh.submit(request, job_id=first.id, attempt=2, journal=read_journal(cut))
        same(again.result(timeout=60), first.result(timeout=60))
        assert [type(event) for event in again.events()] == [Started, Finished]
    assert fresh.stats().steps_total == 0
    assert fresh.stats().finished_total == 2


def test_complete_choices_are_not_computed_again(
    engine: Engine, make_engine: Callable[..., Engine], watched: Callable[..., Any]
) -> None:
    request = GenerationRequest(prompt=PROMPT, temperature=0, max_tokens=6, n=2, ignore_eos=True)
    events = list(engine.submit(request).events())
    left = [e for e in events if isinstance(e, Tokens) and (e.choice == 0 or e.index < 2)]
    model = watched()
    fresh = make_engine(model=model)
    fresh.submit(request, journal=read_journal(left)).result(timeout=60)
    known = len(fresh.tokenizer.encode(PROMPT)) + 2
    assert model.steps == [(known,), (1,), (1,), (1,)]


def test_a_job_may_be_interrupted_twice(engine: Engine, other_engine: Engine) -> None:
    request = GenerationRequest(
        prompt=PROMPT, temperature=1.0, seed=8, n=2, max_tokens=20, stop=["zz", "e "], logprobs=1
    )
    first = engine.submit(request, job_id="job")
    first_events = list(first.events())
    whole = first.result(timeout=60)

    # The fixtures keep nothing between examples but engines, which jobs leave as they were.
    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def check(data: st.DataObject) -> None:
        events: list[Event] = first_events
        kept: list[Event] = []
        for attempt in (2, 3):
            kept += merged(events[: data.draw(st.integers(0, len(events) - 1))])
            again = other_engine.submit(
                request, job_id="job", attempt=attempt, journal=read_journal(kept)
            )
            same(again.result(timeout=60), whole)
            events = list(again.events())
            assert shown([*kept, *events]) == shown(first_events)

    check()


def test_a_deadline_that_passed_meanwhile_ends_the_job_with_its_journal(
    engine: Engine, other_engine: Engine
) -> None:
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 25, "ignore_eos": True}
    text = engine.submit(GenerationRequest(**fields)).result(timeout=60).text
    request = GenerationRequest(**fields, n=2, stop=[text[10:40] + "#"], deadline_s=100)
    events = list(engine.submit(request).events())
    for end in range(len(events)):
        cut = events[:end]
        late = other_engine.submit(
            request, journal=read_journal(cut), queued_at=time.time() - 200, attempt=2
        )
        result = late.result(timeout=60)
        seen = read_journal([*cut, *late.events()])
        for choice in result.choices:
            journalled = read_journal(cut).choices.get(choice.index)
            ids = () if journalled is None else journalled.token_ids
            assert choice.token_ids == ids
            assert choice.text == continuation(engine.tokenizer, ids)
            assert choice.finish_reason == ("length" if len(ids) == 25 else "deadline")
            if choice.index in seen.choices:
                assert seen.choices[choice.index].text == choice.text
        assert isinstance(list(late.events())[-1], Finished)
