"""The engine survives a damaged model, lack of memory and defects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest, InternalError, OutOfMemory
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.model import RaggedBatch
from tests.engine.together import all_at_once

PROMPT = "Once upon a time"
POISON = 500


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(temperature=0, ignore_eos=True, **fields)


@pytest.fixture
def expected(make_engine: Callable[..., Engine]) -> str:
    return make_engine().submit(request(prompt=PROMPT, max_tokens=20)).result(timeout=60).text


class DamagedModel:
    """NaN for every row whose last token is the poisoned one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, batch: RaggedBatch, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(batch, cache)
        logits[batch.token_ids[batch.logits_rows] == POISON] = math.nan
        return logits


@pytest.mark.parametrize("fields", [{}, {"n": 3}], ids=["one choice", "three choices"])
def test_logits_that_are_not_finite_fail_their_own_job(
    make_engine: Callable[..., Engine], loaded: Any, expected: str, fields: dict[str, Any]
) -> None:
    engine = make_engine(model=DamagedModel(loaded.model))
    with all_at_once(engine):
        neighbour = engine.submit(request(prompt=PROMPT, max_tokens=20))
        damaged = engine.submit(request(prompt_token_ids=[1, POISON], **fields))
    with pytest.raises(InternalError, match="not finite"):
        damaged.result(timeout=60)
    assert neighbour.result(timeout=60).text == expected


def test_a_batch_too_large_for_memory_shrinks_until_it_fits(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], expected: str
) -> None:
    def run_out_beyond_two(step: int, batch: RaggedBatch) -> None:
        if len(batch.query_lengths) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    engine = make_engine(model=watched(run_out_beyond_two))
    with all_at_once(engine):
        generations = [engine.submit(request(prompt=PROMPT, max_tokens=20)) for _ in range(6)]
    assert [generation.result(timeout=60).text for generation in generations] == [expected] * 6


def test_a_job_too_large_for_memory_fails_alone(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], expected: str
) -> None:
    def run_out_beyond_fifty(step: int, batch: RaggedBatch) -> None:
        if batch.token_ids.numel() > 50:
            raise MemoryError

    engine = make_engine(model=watched(run_out_beyond_fifty))
    with all_at_once(engine):
        large = engine.submit(request(prompt_token_ids=[7] * 200, max_tokens=5))
        small = [engine.submit(request(prompt=PROMPT, max_tokens=20)) for _ in range(3)]
    with pytest.raises(OutOfMemory, match="200 tokens"):
        large.result(timeout=60)
    assert [generation.result(timeout=60).text for generation in small] == [expected] * 3


def test_a_defect_in_one_step_fails_the_jobs_of_that_step_only(
    make_engine: Callable[..., Engine],
    watched: Callable[..., Any],
    gate: Callable[..., Any],
    expected: str,
) -> None:
    hold = gate(at=1)

    def fail_once(step: int, batch: RaggedBatch) -> None:
        hold(step, batch)
        if step == 4:
            raise ValueError("a defect")

    engine = make_engine(model=watched(fail_once), max_sequences=2)
    generations = [engine.submit(request(prompt=PROMPT, max_tokens=20)) for _ in range(4)]
    hold.open()
    for generation in generations[:2]:
        with pytest.raises(InternalError, match="ValueError"):
            generation.result(timeout=60)
    assert [g.result(timeout=60).text for g in generations[2:]] == [expected] * 2
    assert engine.healthy


def test_a_defect_in_the_text_of_one_job_affects_no_other(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    engine = make_engine()
    token_text = engine.tokenizer.token_text
    calls = iter(range(100))

    def broken(token_id: int) -> str:
        if next(calls) == 5:
            raise ValueError("a defect")
        return token_text(token_id)

    monkeypatch.setattr(engine.tokenizer, "token_text", broken)
    with all_at_once(engine):
        neighbour = engine.submit(request(prompt=PROMPT, max_tokens=20))
        with_logprobs = engine.submit(request(prompt=PROMPT, max_tokens=20, logprobs=0))
    with pytest.raises(InternalError, match="deliver"):
        with_logprobs.result(timeout=60)
    assert neighbour.result(timeout=60).text == expected


def test_a_defect_in_the_text_of_a_job_at_its_deadline_affects_no_other(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    finish = Generation.finish

    def fails(self: Generation, *arguments: Any) -> None:
        if self.deadline_s is not None:
            raise ValueError("not UTF-8")
        finish(self, *arguments)

    monkeypatch.setattr(Generation, "finish", fails)
    engine = make_engine()
    late = engine.submit(request(prompt=PROMPT, max_tokens=50, deadline_s=1e-3))
    with pytest.raises(InternalError):
        late.result(timeout=60)
    assert engine.submit(request(prompt=PROMPT, max_tokens=20)).result(timeout=60).text == expected


def test_if_the_thread_dies_every_job_fails_and_none_hangs(
    make_engine: Callable[..., Engine],
    watched: Callable[..., Any],
    gate: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold = gate(at=3)
    engine = make_engine(model=watched(hold), max_sequences=2)
    generations = [engine.submit(request(prompt=PROMPT, max_tokens=50)) for _ in range(5)]
    hold.wait_until_reached()

    def broken(*_: object) -> None:
        raise AssertionError("a broken invariant")

    monkeypatch.setattr(engine._scheduler, "schedule", broken)
    monkeypatch.setattr(engine._scheduler, "schedule_ahead", broken)
    hold.open()
    for generation in generations:
        with pytest.raises(InternalError, match="broke down"):
            generation.result(timeout=60)
        assert list(generation.events())
    assert not engine.healthy
    with pytest.raises(InternalError, match="broke down"):
        engine.submit(request(prompt=PROMPT))
    with pytest.raises(InternalError, match="broke down"):
        engine.logits([1, 2])
    monkeypatch.undo()
    for sequence in engine._scheduler.running:
        engine._scheduler.finish(sequence)
    for plan in engine._scheduler._launched:
        engine._scheduler.drop(plan)


@pytest.mark.parametrize("fields", [{}, {"n": 2}], ids=["one choice", "two choices"])
def test_a_suspects_prompt_is_computed_in_steps_of_its_own(
    make_engine: Callable[..., Engine],
    watched: Callable[..., Any],
    expected: str,
    fields: dict[str, Any],
) -> None:
    """So that a process which dies there died of it."""
    company: list[int] = []

    def watch(_: int, batch: RaggedBatch) -> None:
        if POISON in batch.token_ids.tolist():
            company.append(len(batch.query_lengths))

    engine = make_engine(model=watched(watch), max_step_tokens=16, prefix_caching=False)
    with all_at_once(engine):
        neighbours = [engine.submit(request(prompt=PROMPT, max_tokens=20)) for _ in range(2)]
        long = request(prompt_token_ids=[1, *[POISON] * 40], max_tokens=3, **fields)
        suspect = engine.submit(long, suspect=True)
    suspect.result(timeout=60)
    assert len(company) >= 3
    assert max(company) <= long.n
    assert [neighbour.result(timeout=60).text for neighbour in neighbours] == [expected] * 2
