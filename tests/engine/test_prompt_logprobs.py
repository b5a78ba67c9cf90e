"""Log probabilities of the prompt's own tokens: right, computed once, and in bounded memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import (
    Finished,
    GenerationRequest,
    GenerationResult,
    InternalError,
    OutOfMemory,
    Started,
    TokenLogprobs,
    read_journal,
)
from llorch_worker.engine import Engine
from llorch_worker.engine import engine as engine_module
from llorch_worker.model import RaggedBatch
from tests.engine.together import all_at_once

MakeEngine = Callable[..., Engine]
Logprobs = tuple[TokenLogprobs | None, ...]

STORY = [1, *(3 + (7 * i + i * i) % 500 for i in range(209))]
TEXT = "Once upon a time, there was a little girl named Lily. She had a red ball. " * 3


def request(ids: list[int] = STORY, **fields: Any) -> GenerationRequest:
    fields = {"prompt_logprobs": 3, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return GenerationRequest(prompt_token_ids=ids, **fields)


def logprobs(result: GenerationResult) -> Logprobs:
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


class Scoring:
    """A real model that notes how many rows of logits each step samples and scores.

    ``during`` is called before each piece of scored rows with its number, from 1, and the step's
    number of sequences; it may raise.
    """

    def __init__(self, model: Any, during: Callable[[int, int], None] | None = None) -> None:
        self.model = model
        self.during = during
        self.sampled: list[int] = []
        self.pieces: list[int] = []
        self.spoil = False

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self.sampled.append(len(batch.logits_rows))
        if (read := batch.read_logits) is not None:
            batch = replace(batch, read_logits=lambda of: read(self._noted(of, batch)))
        logits: torch.Tensor = self.model.forward(batch, cache)
        return logits

    def _noted(
        self, logits_of: Callable[[torch.Tensor], torch.Tensor], batch: RaggedBatch
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def logits(rows: torch.Tensor) -> torch.Tensor:
            self.pieces.append(len(rows))
            if self.during is not None:
                self.during(len(self.pieces), len(batch.query_lengths))
            found = logits_of(rows)
            if self.spoil:
                found[-1, 7] = math.nan
            return found

        return logits


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Logprobs:
    """Those of ``STORY`` with three alternatives."""
    return logprobs(engine.submit(request()).result(60))


def same(found: Logprobs, expected: Logprobs) -> None:
    """Compares up to the rounding of products of other shapes."""
    assert len(found) == len(expected)
    assert found[0] is expected[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.id, one.text) == (other.id, other.text)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.logprob for top in one.top] == pytest.approx(
            [top.logprob for top in other.top], abs=1e-4
        )


# What they are --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["f32.gguf", "hf"])
def test_they_are_those_of_transformers(trained_model: Path, file: str) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(trained_model / "hf", dtype=torch.float32).eval()
    with Engine.load(trained_model / file, device="cpu", max_step_tokens=50) as engine:
        ids = engine.tokenizer.encode(TEXT)
        result = engine.submit(request(ids, prompt_logprobs=20, max_tokens=0)).result(60)
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    for place, entry in enumerate(logprobs(result)[1:], start=1):
        assert entry is not None
        row = reference[place - 1]
        assert entry.id == ids[place]
        assert entry.logprob == pytest.approx(float(row[entry.id]), abs=1e-3)
        assert len({top.id for top in entry.top}) == 20
        of_top = [float(row[top.id]) for top in entry.top]
        assert [top.logprob for top in entry.top] == pytest.approx(of_top, abs=1e-3)
        assert of_top == pytest.approx(row.topk(20).values.tolist(), abs=1e-3)


def test_sampling_parameters_do_not_change_them(engine: Engine, expected: Logprobs) -> None:
    fields: dict[str, Any] = {"temperature": 1.7, "seed": 5, "top_k": 4, "logit_bias": {7: 50.0}}
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logprobs": 2}
    result = engine.submit(request(**fields, **penalties)).result(60)
    same(logprobs(result), expected)


def test_they_change_no_token(engine: Engine) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 3, "n": 3, "logprobs": 1, "max_tokens": 20}
    scored = engine.submit(request(**fields)).result(60)
    plain = engine.submit(request(**{**fields, "prompt_logprobs": None})).result(60)
    assert plain.prompt_logprobs is None
    for choice, other in zip(scored.choices, plain.choices, strict=True):
        assert choice.token_ids == other.token_ids


# Chunks, company, caching ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_engines(trained_model: Path) -> Iterator[Callable[..., Engine]]:
    """Engines whose products do not depend on their shape, as ``Engine.load`` makes them."""
    engines: dict[int, Engine] = {}

    def of(max_step_tokens: int) -> Engine:
        if max_step_tokens not in engines:
            engines[max_step_tokens] = Engine.load(
                trained_model / "f32.gguf", device="cpu", max_step_tokens=max_step_tokens
            )
        return engines[max_step_tokens]

    yield of
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 209])
def test_they_do_not_depend_on_the_size_of_chunks(
    exact_engines: Callable[..., Engine], step_tokens: int
) -> None:
    """Bit by bit."""
    whole = exact_engines(2048).submit(request(prompt_logprobs=20)).result(60)
    parts = exact_engines(step_tokens).submit(request(prompt_logprobs=20)).result(60)
    assert parts.prompt_logprobs == whole.prompt_logprobs
    assert parts.choices == whole.choices


@pytest.mark.parametrize("step_tokens", [30, 2048])
def test_they_are_the_same_in_company(
    exact_engines: Callable[..., Engine], step_tokens: int
) -> None:
    """Bit by bit, beside jobs with fewer alternatives, with none, and without any."""
    engine = exact_engines(step_tokens)
    requests = [
        request(
            STORY[: 30 + 17 * index],
            prompt_logprobs=[None, 0, 1, 20][index % 4],
            max_tokens=index % 5 or 9,
        )
        for index in range(12)
    ]
    alone = [engine.submit(each).result(60) for each in requests]
    with all_at_once(engine):
        together = [engine.submit(each) for each in requests]
    for generation, other in zip(together, alone, strict=True):
        result = generation.result(60)
        assert result.prompt_logprobs == other.prompt_logprobs
        assert result.choices == other.choices


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_logits_of_few_rows_exist_at_once(
    make_engine: MakeEngine,
    loaded: Any,
    expected: Logprobs,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
) -> None:
    monkeypatch.setattr(engine_module, "scored_rows", lambda *_, **__: rows)
    model = Scoring(loaded.model)
    same(logprobs(make_engine(model=model).submit(request()).result(60)), expected)
    whole, rest = divmod(209, rows)
    assert model.pieces == [rows] * whole + [rest] * bool(rest)


def test_a_cached_prompt_is_computed_again_and_serves_others_afterwards(
    make_engine: MakeEngine, loaded: Any, expected: Logprobs
) -> None:
    model = Scoring(loaded.model)
    engine = make_engine(model=model)
    plain: dict[str, Any] = {"prompt_logprobs": None}
    first = engine.submit(request(**plain)).result(60)
    scored = engine.submit(request()).result(60)
    same(logprobs(scored), expected)
    assert scored.choices == first.choices
    assert scored.usage.cached == 0
    assert engine.submit(request(**plain)).result(60).usage.cached == 208
    engine = make_engine(model=model)
    engine.submit(request(max_tokens=0)).result(60)
    assert engine.submit(request(**plain)).result(60).usage.cached == 208


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_all_choices_share_one_computation(
    make_engine: MakeEngine, loaded: Any, expected: Logprobs, max_tokens: int
) -> None:
    model = Scoring(loaded.model)
    engine = make_engine(model=model, max_step_tokens=50)
    result = engine.submit(request(n=4, max_tokens=max_tokens)).result(60)
    same(logprobs(result), expected)
    assert sum(model.pieces) == 209
    assert len(result.choices) == 4
    assert result.usage.completion == 4 * max_tokens


# Without a token ------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_tokens", "n"), [(1, 3), (209, 1), (2048, 3)])
def test_without_tokens_it_ends_after_its_prefill(
    make_engine: MakeEngine, loaded: Any, expected: Logprobs, step_tokens: int, n: int
) -> None:
    model = Scoring(loaded.model)
    engine = make_engine(model=model, max_step_tokens=step_tokens)
    generation = engine.submit(request(max_tokens=0, n=n))
    result = generation.result(60)
    same(logprobs(result), expected)
    assert [(c.text, c.token_ids, c.finish_reason) for c in result.choices] == [
        ("", (), "length")
    ] * n
    assert (result.usage.prompt, result.usage.cached, result.usage.completion) == (210, 0, 0)
    assert [type(event) for event in generation.events()] == [Started, Finished]
    assert set(model.sampled) == {0}
    assert engine.stats().completion_tokens_total == 0
    assert engine.stats().finished_total == 1


# Interruptions --------------------------------------------------------------------------------


def test_a_preempted_prefill_keeps_what_it_knows(
    make_engine: MakeEngine, loaded: Any, expected: Logprobs
) -> None:
    model = Scoring(loaded.model)
    # Room for both at first; the urgent job's own tokens then need the last blocks.
    engine = make_engine(model=model, num_blocks=17, max_step_tokens=4)
    urgent = request([5, 6], prompt_logprobs=None, max_tokens=120, priority="high")
    with all_at_once(engine):
        first = engine.submit(urgent)
        scored = engine.submit(request(max_tokens=0))
    same(logprobs(scored.result(60)), expected)
    assert first.result(60).usage.completion == 120
    assert engine.stats().preempted_total > 0
    assert engine.stats().prompt_tokens_total > 2 + 210, "it was preempted in mid-prefill"
    assert sum(model.pieces) == 209
    assert scored.result(60).usage.cached == 0


def test_a_resumed_job_computes_them_again(make_engine: MakeEngine, expected: Logprobs) -> None:
    """No journal has them, not even that of a job that has ended."""
    engine, other = make_engine(), make_engine(max_step_tokens=64)
    whole = request(n=2, max_tokens=7, temperature=1, seed=4)
    generation = engine.submit(whole, job_id="job")
    result = generation.result(60)
    events = list(generation.events())
    for end in range(0, len(events) + 1, 2):
        journal = read_journal(events[:end])
        resumed = other.submit(whole, job_id="job", attempt=2, journal=journal).result(60)
        assert resumed.choices == result.choices
        assert resumed.usage.completion == result.usage.completion
        same(logprobs(resumed), expected)


def test_a_deadline_in_mid_prefill_gives_none(make_engine: MakeEngine, loaded: Any) -> None:
    submitted = threading.Event()

    def wait_for_the_deadline(piece: int, _sequences: int) -> None:
        if piece == 3:
            assert submitted.wait(60)
            assert scored.deadline_s is not None
            threading.Event().wait(max(0.0, scored.deadline_s - time.monotonic()))

    engine = make_engine(model=Scoring(loaded.model, wait_for_the_deadline), max_step_tokens=16)
    scored = engine.submit(request(max_tokens=0, deadline_s=0.5))
    submitted.set()
    result = scored.result(60)
    assert result.choices[0].finish_reason == "deadline"
    assert result.prompt_logprobs is None
    assert result.usage.completion == 0


def test_a_prompt_that_cannot_be_scored_in_the_memory_fails_alone(
    make_engine: MakeEngine, loaded: Any
) -> None:
    def run_out(piece: int, sequences: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    engine = make_engine(model=Scoring(loaded.model, run_out))
    with all_at_once(engine):
        scored = engine.submit(request())
        plain = engine.submit(request(STORY[50:], prompt_logprobs=None))
    with pytest.raises(OutOfMemory):
        scored.result(60)
    assert plain.result(60).usage.completion == 4


def test_logits_that_are_not_finite_fail_the_job_and_its_values_are_not_found_again(
    make_engine: MakeEngine, loaded: Any, expected: Logprobs
) -> None:
    model = Scoring(loaded.model)
    engine = make_engine(model=model, max_step_tokens=64)
    model.spoil = True
    with pytest.raises(InternalError, match="not finite"):
        engine.submit(request()).result(60)
    model.spoil = False
    assert engine.submit(request(prompt_logprobs=None)).result(60).usage.cached == 0
    same(logprobs(engine.submit(request()).result(60)), expected)
