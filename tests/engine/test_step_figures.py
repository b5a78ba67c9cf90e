"""What the engine tells of its steps adds up to what its jobs return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_worker.contract import GenerationRequest, GenerationResult, Journal
from llorch_worker.contract.journal import JournalledChoice
from llorch_worker.engine import Engine
from tests.engine.structured import AS_RECORD, asking

PROMPT = "Once upon a time there was a little girl named Lily who loved to play outside"
TIMEOUT_S = 60


@pytest.fixture
def engine(trained_model: Path) -> Iterator[Engine]:
    with Engine.load(trained_model / "f32.gguf", device="cpu", max_sequences=4) as engine:
        yield engine


def run(engine: Engine, *requests: GenerationRequest) -> list[GenerationResult]:
    generations = [engine.submit(request) for request in requests]
    return [generation.result(TIMEOUT_S) for generation in generations]


def wrong_drafts(engine: Engine) -> int:
    stats = engine.stats()
    return stats.draft_tokens_total - stats.accepted_draft_tokens_total


def test_tokens_add_up_to_those_of_the_results(engine: Engine) -> None:
    requests = [
        GenerationRequest(prompt=f"{number} {PROMPT}", max_tokens=5 + 3 * number, seed=number)
        for number in range(9)
    ]
    wrong_before = wrong_drafts(engine)
    results = run(engine, *requests)
    figures = engine.step_figures()
    completion = sum(result.usage.completion for result in results)
    assert figures.generated_tokens == completion
    assert figures.prompt_tokens == sum(result.usage.prompt for result in results)
    assert figures.looked_up_tokens == figures.prompt_tokens
    assert figures.found_tokens == sum(result.usage.cached for result in results)
    # Every token but the first of each text has a gap.
    assert figures.token_gaps.count == completion - len(results)
    longest_s = max(result.timings.decode_ms for result in results) / 1e3
    assert 0 < figures.token_gaps.sum <= longest_s * len(results)
    # All but the last token of a text are computed, and all of its prompt that was not found, and
    # drafts that did not hold.
    computed = figures.prompt_tokens - figures.found_tokens + completion - len(results)
    assert figures.step_tokens.sum == computed + wrong_drafts(engine) - wrong_before
    assert figures.step_tokens.count <= completion


def test_a_prompt_that_comes_again_is_found(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=2, temperature=0)
    (first,) = run(engine, request)
    assert (engine.step_figures().found_tokens, first.usage.cached) == (0, 0)
    (second,) = run(engine, request)
    assert engine.step_figures().found_tokens == second.usage.cached > 0


def test_a_prompt_counts_once_for_all_choices(engine: Engine) -> None:
    (result,) = run(engine, GenerationRequest(prompt=PROMPT, max_tokens=6, n=3, seed=1))
    figures = engine.step_figures()
    assert figures.prompt_tokens == result.usage.prompt
    assert figures.looked_up_tokens == 3 * result.usage.prompt
    assert figures.generated_tokens == result.usage.completion
    assert figures.token_gaps.count == result.usage.completion - 3


def test_tokens_that_a_grammar_forces_count(engine: Engine) -> None:
    (result,) = run(engine, asking(**AS_RECORD))
    assert json.loads(result.text)
    figures = engine.step_figures()
    assert figures.generated_tokens == result.usage.completion
    assert figures.token_gaps.count == result.usage.completion - 1
    assert figures.step_tokens.count < result.usage.completion, "no token was forced"


def test_a_resumed_job_counts_what_it_generates_here(engine: Engine) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=20, seed=3, ignore_eos=True)
    (whole,) = run(engine, request)
    before = engine.step_figures().generated_tokens
    ids = whole.choices[0].token_ids[:15]
    text = whole.text[:10]
    journal = Journal({0: JournalledChoice(ids, text)})
    assert engine.submit(request, journal=journal).result(TIMEOUT_S).text == whole.text
    assert engine.step_figures().generated_tokens - before == 5
