"""With drafts each job gets the tokens, the text and the bits of the log probabilities that it gets
without: alone, in company, preempted, cancelled beside others, and resumed.

``LLORCH_FULL_SIZE=1`` runs 1,500 jobs for each kind of kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.cache import BlockPool
from llorch_worker.contract import GenerationRequest, read_journal
from llorch_worker.engine import Engine
from llorch_worker.engine.draft_logits import DraftLogits
from llorch_worker.engine.draft_planner import DraftPlanner, StepCosts
from llorch_worker.engine.drafter import Draft, Drafter
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import WatchedModel
from tests.engine.lazy_queue import LazyQueue
from tests.engine.random_company import (
    WAYS,
    Job,
    model_and_options,
    other_bits,
    other_tokens,
    run_alone,
    run_in_company,
)
from tests.engine.structured import AS_RECORD, TIMEOUT_S
from tests.engine.together import all_at_once
from tests.sizes import sized

JOBS = sized(usual=12, full=1_500)
PHRASES = [
    "Once upon a time, there was a little girl named Lily.",
    "She liked to play with her red ball.",
    "The dog ran to the park.",
    "Tom said, I want to play with you.",
]


def repeating_requests(count: int, seed: int) -> Iterator[GenerationRequest]:
    """Every kind of parameter, with prompts that the text is likely to repeat."""
    rng = random.Random(seed)
    endings: list[dict[str, Any]] = [
        {},
        {},
        {"stop": ["park", "She liked"]},
        {"stop": [" the", "\n"], "min_tokens": 9},
        {"stop_token_ids": [300, 310, 320]},
        AS_RECORD,
        {"structured_outputs": {"regex": "(She liked to play with her (red|big) ball\\. ){1,4}"}},
        {"structured_outputs": {"choice": ["The dog ran to the park.", "The dog ran home."]}},
    ]
    for _ in range(count):
        phrases = rng.choices(PHRASES, k=rng.randint(1, 8))
        yield GenerationRequest(
            prompt=" ".join(phrases),
            max_tokens=rng.randint(9, 60),
            temperature=rng.choice([0, 0, 0.3, 0.8, 1.2]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([0, 0, 5]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.1]),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, -0.3]),
            logit_bias=rng.choice([None, None, {300: -4.0, 310: 3.0}]),
            seed=rng.randrange(2**31),
            n=rng.choice([1, 1, 1, 2]),
            logprobs=rng.choice([None, 0, 3]),
            ignore_eos=rng.random() < 0.5,
            **rng.choice(endings),
        )


class RightAndWrong(Drafter):
    """Drafts what a job answered without drafts, each token wrong with the given chance."""

    def __init__(self, texts: list[list[int]], seed: int = 0, wrong: float = 1 / 6) -> None:
        self._texts = texts
        self._rng = random.Random(seed)
        self._wrong = wrong

    def propose(self, token_ids: list[int], most: int) -> Draft:
        size = len(token_ids)
        right = next((t for t in self._texts if t[:size] == token_ids), token_ids)
        drafts = right[size : size + most] or [5] * most
        drafts = [7 if self._rng.random() < self._wrong else token_id for token_id in drafts]
        return Draft(drafts, [1.0] * len(drafts))


def draft_by(engine: Engine, drafter: Drafter) -> None:
    """From now on ``drafter`` drafts for all of its sequences."""
    assert engine._sequence_maker._make_drafter is not None
    engine._sequence_maker._make_drafter = lambda *_: drafter


class FixedCosts(StepCosts):
    """However slow this machine is."""

    def note(self, rows: int, seconds: float) -> None: ...


def with_free_rows(engine: Engine) -> Engine:
    """Every draft pays."""
    if (planner := engine._scheduler.planner) is not None:
        planner.costs = FixedCosts({1: 1.0, 2: 1.0})
    return engine


def texts_of(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    return [
        [*engine.tokenizer.encode(job.request.prompt or ""), *choice.token_ids]
        for job in jobs
        for choice in job.answer
    ]


@cache
def without_drafts(way: str, trained: Path, demo: Path) -> tuple[list[Job], list[list[int]]]:
    """The jobs, each run alone, and their texts."""
    path, options = model_and_options(way, trained, demo)
    with Engine.load(path, device="cpu", **options) as engine:
        jobs = run_alone(engine, repeating_requests(JOBS, seed=1))
        return jobs, texts_of(engine, jobs)


KERNELS = [way for way in WAYS if way != "bfloat16 on torch"]
COMPANIES = ("looked up", "once more", "right and wrong")
"""In turn in one engine. Usually all with the first kind of kernels, and else the last."""


@pytest.mark.timeout(600 if JOBS < 1_000 else 7_200)
@pytest.mark.parametrize("way", KERNELS)
def test_drafts_change_no_bit_of_any_job(trained_model: Path, demo_model: Path, way: str) -> None:
    path, options = model_and_options(way, trained_model, demo_model)
    jobs, texts = without_drafts(way, trained_model, demo_model)
    # Few blocks, so that sequences are preempted; small steps, so that drafts yield to prefills.
    small: dict[str, Any] = {
        "device": "cpu",
        "max_sequences": 8,
        "max_step_tokens": 48,
        "max_context": 176,
        "drafter": "suffix",
        **options,
    }
    kv_cache_bytes = plan_load(path, EngineOptions(**small)).kv_bytes(11)
    with with_free_rows(Engine.load(path, kv_cache_bytes=kv_cache_bytes, **small)) as engine:
        tries_all = sized(usual=way == KERNELS[0], full=True)
        for company in COMPANIES if tries_all else COMPANIES[-1:]:
            if company == "right and wrong":
                draft_by(engine, RightAndWrong(texts, seed=3))
            answers = run_in_company(engine, jobs, seed=2)
            engine.check_integrity()
            assert other_tokens(jobs, answers) == [], company
            assert other_bits(jobs, answers) == [], company
        with all_at_once(engine):
            generations = [engine.submit(job.request) for job in jobs]
        answers = [generation.result(TIMEOUT_S).choices for generation in generations]
        assert other_bits(jobs, answers) == []
        stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total
    assert stats.preempted_total > 0


def test_a_text_that_repeats_itself_takes_fewer_steps(
    make_engine: Callable[..., Engine], watched: Callable[..., WatchedModel]
) -> None:
    steps = {}
    for drafter in ("off", "lookup"):
        model = watched()
        engine = with_free_rows(make_engine(model=model, drafter=drafter))
        request = GenerationRequest(
            prompt=PHRASES[0], max_tokens=60, temperature=0, logit_bias={300: 100.0}
        )
        engine.submit(request).result(60)
        steps[drafter] = len(model.steps)
    assert steps["off"] == 60
    # Sixteen tokens a step, once it repeats itself.
    assert steps["lookup"] <= 9


def test_a_request_can_turn_drafts_off(make_engine: Callable[..., Engine]) -> None:
    engine = with_free_rows(make_engine(drafter="lookup"))
    begun = PHRASES[0].removesuffix(" girl named Lily.")
    fields = {"prompt": f"{PHRASES[0]} {begun}", "max_tokens": 30, "temperature": 0}
    engine.submit(GenerationRequest(**fields, speculation="off")).result(60)
    assert engine.stats().draft_tokens_total == 0
    engine.submit(GenerationRequest(**fields)).result(60)
    assert engine.stats().draft_tokens_total > 0


def test_drafts_leave_nothing_in_the_prefix_cache(make_engine: Callable[..., Engine]) -> None:
    """The blocks that are kept hold accepted tokens only, as many as without drafts."""
    request = GenerationRequest(prompt=PHRASES[1] * 3, max_tokens=50, temperature=0.5, seed=1)
    kept = []
    for drafter in ("off", "lookup"):
        engine = with_free_rows(make_engine(drafter=drafter))
        answer = engine.submit(request).result(60).choices[0]
        ids = [*engine.tokenizer.encode(request.prompt or ""), *answer.token_ids]
        again = GenerationRequest(prompt_token_ids=ids, max_tokens=1, temperature=0)
        kept.append((engine.stats().kv_blocks_kept, engine.submit(again).result(60).usage.cached))
    assert kept[0] == kept[1]


class OnlyWrong(Drafter):
    def propose(self, token_ids: list[int], most: int) -> Draft:
        return Draft([3] * most, [1.0] * most)


def test_drafts_that_never_hold_cost_no_token(make_engine: Callable[..., Engine]) -> None:
    request = GenerationRequest(prompt=PHRASES[0], max_tokens=40, temperature=0.9, seed=4, n=2)
    expected = make_engine().submit(request).result(60).choices
    engine = with_free_rows(make_engine(drafter="lookup"))
    draft_by(engine, OnlyWrong())
    assert engine.submit(request).result(60).choices == expected
    assert engine.stats().draft_tokens_total > 2 * 15 * 30
    assert engine.stats().accepted_draft_tokens_total == 0


def test_drafts_that_do_not_hold_take_no_block_from_another(
    make_sequence: Callable[..., Sequence],
) -> None:
    """When the second one ends, the two have four blocks of tokens each; the first one's drafts
    would go on into eight."""
    planner = DraftPlanner(32)
    planner.costs = FixedCosts({1: 1.0, 2: 1.0})
    s = Scheduler(BlockPool(9), block_size=4, max_sequences=2, max_step_tokens=64, planner=planner)
    first = make_sequence([1] * 4, arrival=0, max_tokens=32)
    second = make_sequence([2] * 4, arrival=1, max_tokens=12)
    first.drafter = OnlyWrong()
    for sequence in (first, second):
        s.add(sequence)
    drafted = 0
    while second.finish_reason is None:
        plan = s.schedule()
        drafted += sum(len(chunk.drafts) for chunk in plan.chunks)
        s.advance(plan)
        for chunk in plan.chunks:
            chunk.sequence.append(1)
            if chunk.sequence.finish_reason is not None:
                s.finish(chunk.sequence)
        s.check_integrity()
    assert drafted > 0
    assert s.preempted_total == 0


def test_a_draft_that_ends_the_text_counts_too(make_engine: Callable[..., Engine]) -> None:
    fields = {"prompt": PHRASES[0], "max_tokens": 60, "temperature": 0}
    engine = with_free_rows(make_engine(drafter="lookup"))
    off = GenerationRequest(**fields, ignore_eos=True, speculation="off")
    ids = engine.submit(off).result(60).choices[0].token_ids
    last = next(at for at in range(6, 14) if ids[at] not in ids[:at])
    draft_by(engine, RightAndWrong([[*engine.tokenizer.encode(PHRASES[0]), *ids]], wrong=0))
    request = GenerationRequest(**fields, ignore_eos=True, stop_token_ids=(ids[last],))
    result = engine.submit(request).result(60)
    assert result.choices[0].token_ids == ids[: last + 1]
    # The prefill gives the first.
    assert result.usage.accepted_draft_tokens == last
    assert engine.stats().accepted_draft_tokens_total == last


def test_drafts_that_cannot_be_checked_cost_no_token_and_count_once(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest(prompt=PHRASES[0], max_tokens=30, seed=4, ignore_eos=True)
    engine = with_free_rows(make_engine(drafter="lookup"))
    off = request.model_copy(update={"speculation": "off"})
    expected = engine.submit(off).result(60).choices
    ids = [*engine.tokenizer.encode(PHRASES[0]), *expected[0].token_ids]
    draft_by(engine, RightAndWrong([ids], wrong=0))
    failed = []

    def fail(*_: Any) -> None:
        failed.append(True)
        raise MemoryError

    monkeypatch.setattr(DraftLogits, "sample", fail)
    before = engine.stats().completion_tokens_total
    assert engine.submit(request).result(60).choices == expected
    assert failed
    assert engine.stats().completion_tokens_total - before == 30


def test_only_the_tenants_own_texts_draft_for_it(make_engine: Callable[..., Engine]) -> None:
    """Its second job takes few steps; another tenant's same job takes as many as the first."""
    engine = with_free_rows(make_engine(drafter="suffix"))

    def figures(tenant: str | None, **fields: Any) -> tuple[int, int, int]:
        before = engine.stats()
        request = GenerationRequest(
            prompt=PHRASES[0], max_tokens=60, seed=3, tenant=tenant, ignore_eos=True, **fields
        )
        engine.submit(request).result(60)
        after = engine.stats()
        return (
            after.steps_total - before.steps_total,
            after.draft_tokens_total - before.draft_tokens_total,
            after.accepted_draft_tokens_total - before.accepted_draft_tokens_total,
        )

    first = figures("a", speculation="off")
    assert first == (60, 0, 0)
    own = figures("a")
    assert figures("b") == figures(None) == own, "what is kept of one tenant drafts for another"
    steps, _, accepted = figures("a")
    assert steps < own[0] / 3
    assert accepted > 40


def test_a_prediction_drafts_and_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    fields = {"prompt": PHRASES[1], "max_tokens": 60, "seed": 8, "ignore_eos": True}
    expected = make_engine().submit(GenerationRequest(**fields)).result(60)
    engine = with_free_rows(make_engine(drafter="lookup"))
    steps = [0]
    accepted = []
    for prediction in (None, expected.text, "Something else. " + expected.text[9:], ""):
        result = engine.submit(GenerationRequest(**fields, prediction=prediction)).result(60)
        assert result.choices == expected.choices
        steps.append(engine.stats().steps_total)
        accepted.append(result.usage.accepted_draft_tokens)
    alone, predicted, in_part, empty = (after - before for before, after in pairwise(steps))
    assert predicted <= 10
    assert predicted <= in_part < alone
    assert empty == alone
    assert accepted[1] >= 45
    assert engine.stats().accepted_draft_tokens_total == sum(accepted)


def test_a_prediction_is_read_as_far_as_the_text_may_reach(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of one token must not have a worker tokenise a million characters."""
    engine = make_engine(drafter="lookup")
    encode, sizes = engine.tokenizer.encode, []

    def watched(text: str, *arguments: Any, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(text, *arguments, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    prediction = "park " * 200_000
    for most in (1, 60):
        request = GenerationRequest(prompt="Lily", max_tokens=most, prediction=prediction)
        engine.submit(request).result(60)
    assert max(sizes) < 60 * 40


def test_a_prediction_with_a_token_that_the_model_lacks_drafts_without_it(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary that was added to has ids beyond the embedding."""
    fields = {"prompt_token_ids": (300, 310, 320), "max_tokens": 10, "temperature": 0}
    engine = with_free_rows(make_engine(drafter="lookup"))
    expected = engine.submit(GenerationRequest(**fields)).result(60).choices
    said = expected[0].token_ids
    predicted = [320, said[0], engine.config.vocab_size, *said[1:]]
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: predicted)
    result = engine.submit(GenerationRequest(**fields, prediction="Once [PAD] upon")).result(60)
    assert result.choices == expected
    assert result.usage.accepted_draft_tokens >= 7


def test_steps_are_launched_ahead_again_while_there_is_no_memory_for_drafts(
    make_engine: Callable[..., Engine],
    watched: Callable[..., WatchedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def run_out(step: int, batch: RaggedBatch) -> None:
        if len(batch.logits_rows) > 1:
            tried.append(step)
            raise MemoryError

    monkeypatch.setattr("llorch_worker.engine.draft_planner.MEMORY_PAUSE_S", 3600.0)
    queue = LazyQueue()
    engine = with_free_rows(make_engine(drafter="lookup", model=watched(run_out), queue=queue))
    draft_by(engine, OnlyWrong())
    request = GenerationRequest(prompt=PHRASES[0], max_tokens=20, ignore_eos=True, seed=2)
    expected = make_engine().submit(request).result(60).choices
    assert engine.submit(request).result(60).choices == expected
    queue.unread_at_launch.clear()
    engine.submit(request).result(60)
    assert queue.unread_at_launch == [0] + [1] * 19
    assert len(tried) == 1
    # Later there may be some.
    assert engine._scheduler.planner is not None
    engine._scheduler.planner._pauses_until_s = 0.0
    assert engine.submit(request).result(60).choices == expected
    assert len(tried) == 2


def test_another_worker_resumes_from_accepted_tokens_alone(
    make_engine: Callable[..., Engine],
) -> None:
    """With drafts and without, wherever the first worker was lost."""
    engine = with_free_rows(make_engine(drafter="lookup"))
    request = GenerationRequest(prompt=PHRASES[0], max_tokens=28, temperature=0.8, seed=9)
    off = engine.submit(request.model_copy(update={"speculation": "off"})).result(60).choices
    ids = [*engine.tokenizer.encode(PHRASES[0]), *off[0].token_ids]
    draft_by(engine, RightAndWrong([ids], wrong=1 / 2))
    generation = engine.submit(request)
    answer, events = generation.result(60).choices, list(generation.events())
    assert answer == off
    assert engine.stats().accepted_draft_tokens_total > 0
    assert engine.stats().accepted_draft_tokens_total < engine.stats().draft_tokens_total
    for end in range(0, len(events), 3):
        for other in (engine, make_engine()):
            resumed = other.submit(request, journal=read_journal(events[:end]))
            assert resumed.result(60).choices == answer
