"""Prefix caching gives the same tokens and computes shared ones once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import GenerationRequest, InternalError, Started, read_journal
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.model import RaggedBatch
from tests.sizes import sized

MakeEngine = Callable[..., Engine]

BLOCK = 16
STORY = [1, *(3 + (7 * i + i * i) % 500 for i in range(399))]
"""400 token ids: 25 full blocks."""


def request(ids: list[int], **fields: Any) -> GenerationRequest:
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return GenerationRequest(prompt_token_ids=ids, **fields)


def started(generation: Generation) -> Started:
    event = next(generation.events())
    assert isinstance(event, Started)
    return event


class NotedLogits:
    """The real model; notes the logits of every row, and may spoil the keys that it writes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[torch.Tensor] = []
        self.spoil = False

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(batch, cache)
        if self.spoil:
            cache.kv.groups[0].keys.flatten(1, 2)[:, batch.places[0].slots] = torch.nan
            logits[:] = torch.nan
        self.rows += logits.clone()
        return logits


@pytest.fixture
def together(
    make_engine: MakeEngine, watched: Callable[..., Any], gate: Callable[..., Any]
) -> Callable[..., tuple[Engine, Any, list[Generation]]]:
    """Submits requests while a first step is held, so that they are admitted together."""

    def run(
        requests: list[GenerationRequest], **settings: Any
    ) -> tuple[Engine, Any, list[Generation]]:
        hold = gate(at=1)
        model = watched(hold)
        engine = make_engine(model=model, **settings)
        engine.submit(request([2], max_tokens=1))
        hold.wait_until_reached()
        generations = [engine.submit(each) for each in requests]
        hold.open()
        for generation in generations:
            generation.result(timeout=60)
        return engine, model, generations

    return run


def test_figures_say_nothing_of_what_another_tenant_asked(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def cached(tenant: str | None, ids: list[int]) -> int:
        generation = engine.submit(request(ids, tenant=tenant, max_tokens=1))
        told = generation.result(timeout=60).usage.cached
        assert started(generation).cached_tokens == told
        return told

    text = [*STORY[:192], 3, 7]
    assert cached("a", text) == 0
    assert [cached(tenant, text) for tenant in ("b", None)] == [0, 0]
    # They were found all the same, and are each one's own from then on.
    assert engine.stats().cached_tokens_total == 2 * 192
    assert [cached(tenant, text) for tenant in ("a", "b", None)] == [192] * 3
    # Where two go on alike, each has only what it had itself.
    assert cached("b", STORY) == 192
    assert [cached("a", STORY), cached("a", STORY)] == [192, 384]


def test_of_blocks_that_several_made_the_own_ones_count(together: Callable[..., Any]) -> None:
    requests = [request([*STORY, 3 + i], tenant=tenant) for i, tenant in enumerate("abab")]
    _, _, generations = together(requests)
    cached = [generation.result(timeout=60).usage.cached for generation in generations]
    assert cached == [0, 0, 400, 400]


def test_with_sharing_within_a_tenant_nobody_computes_less_because_of_another(
    together: Callable[..., Any],
) -> None:
    requests = [request([*STORY, 3 + i], tenant=tenant) for i, tenant in enumerate("abab")]
    engine, model, generations = together(requests, prefix_sharing="tenant", max_step_tokens=1024)
    cached = [generation.result(timeout=60).usage.cached for generation in generations]
    assert cached == [0, 0, 400, 400]
    assert model.steps[1] == (401, 401), "neither waits for the other's blocks"
    assert engine.stats().prompt_tokens_total == 1 + 2 * 401 + 2


def test_64_jobs_with_a_common_prefix_prefill_it_once(
    together: Callable[..., Any], make_engine: MakeEngine
) -> None:
    requests = [request([*STORY, 3 + i, 7, 11 + i]) for i in range(64)]
    engine, model, generations = together(requests, max_sequences=64, num_blocks=512)
    stats = engine.stats()
    assert stats.prompt_tokens_total == 1 + 400 + 64 * 3
    assert (stats.prefix_hits_total, stats.cached_tokens_total) == (63, 63 * 400)
    assert max(model.steps[1]) == 403  # the first of them alone
    assert model.steps[2] == (1, *[3] * 63)  # and then all others at once
    cached = [generation.result(timeout=60).usage.cached for generation in generations]
    assert cached == [0] + [400] * 63
    assert [started(generation).cached_tokens for generation in generations] == cached
    plain = make_engine(prefix_caching=False)
    uncached = [plain.submit(each) for each in requests]
    for generation, other in zip(generations, uncached, strict=True):
        assert generation.result(timeout=60).choices == other.result(timeout=60).choices
    assert plain.stats().prompt_tokens_total == 64 * 403


@pytest.mark.parametrize("length", [5, 16, 17, 100, 112])
def test_the_choices_of_a_request_share_the_blocks_of_its_prompt(
    together: Callable[..., Any], length: int
) -> None:
    """At least the last token of the prompt is computed for each."""
    engine, _, (generation,) = together([request(STORY[:length], n=4, temperature=1, seed=5)])
    shared = (length - 1) // BLOCK * BLOCK
    assert engine.stats().prompt_tokens_total == 1 + length + 3 * (length - shared)
    assert engine.stats().cached_tokens_total == 3 * shared
    assert generation.result(timeout=60).usage.cached == 0  # it found nothing but its own
    assert started(generation).cached_tokens == 0


def test_a_run_on_cached_blocks_has_exactly_the_logits_of_an_uncached_one(
    make_engine: MakeEngine, loaded: Any
) -> None:
    """Bit by bit, where the uncached run has its chunk begin where the found blocks end."""
    ids = STORY[: 4 * BLOCK + 9]
    cached, plain = NotedLogits(loaded.model), NotedLogits(loaded.model)
    first = make_engine(model=cached, max_step_tokens=4 * BLOCK)
    first.submit(request([*ids[: 4 * BLOCK], 2], max_tokens=1)).result(timeout=60)
    cached.rows.clear()
    found = first.submit(request(ids, max_tokens=40)).result(timeout=60)
    assert found.usage.cached == 4 * BLOCK
    other = make_engine(model=plain, max_step_tokens=4 * BLOCK, prefix_caching=False)
    expected = other.submit(request(ids, max_tokens=40)).result(timeout=60)
    assert expected.usage.cached == 0
    assert found.choices == expected.choices
    assert torch.equal(torch.stack(cached.rows), torch.stack(plain.rows[-40:]))


def test_a_resumed_job_finds_its_prompt_and_journal(make_engine: MakeEngine) -> None:
    engine, whole = make_engine(), request(STORY[:40], max_tokens=40)
    first = engine.submit(whole, job_id="job")
    result = first.result(timeout=60)
    journal = read_journal(list(first.events())[:30])
    resumed = engine.submit(whole, job_id="job", attempt=2, journal=journal)
    assert resumed.result(timeout=60).choices == result.choices
    assert resumed.result(timeout=60).usage.cached == 40  # all of the prompt
    assert engine.stats().cached_tokens_total == 64  # and what was generated


@pytest.fixture(scope="module")
def plain_tokens(loaded: Any) -> Iterator[Callable[..., tuple[int, ...]]]:
    with loaded.engine(prefix_caching=False) as engine:
        known: dict[str, tuple[int, ...]] = {}
        """Many tests ask for the same."""

        def tokens(each: GenerationRequest) -> tuple[int, ...]:
            key = each.model_dump_json()
            if key not in known:
                known[key] = engine.submit(each).result(timeout=60).choices[0].token_ids
            return known[key]

        yield tokens


@pytest.mark.parametrize(
    ("num_blocks", "step_tokens"),
    sized(usual=[(12, 48)], full=[*product((12, 14, 20), (7, 48))]),
)
def test_a_tiny_pool_gives_the_same_tokens(
    together: Callable[..., Any],
    plain_tokens: Callable[..., tuple[int, ...]],
    num_blocks: int,
    step_tokens: int,
) -> None:
    """Prefixes are shared, preempted, evicted and computed again."""
    requests = [
        request(STORY[: 20 + 31 * (i % 4)] + [3 + i % 5] * (i % 7), max_tokens=40 + i)
        for i in range(16)
    ]
    engine, _, generations = together(
        requests, max_sequences=6, num_blocks=num_blocks, max_step_tokens=step_tokens
    )
    engine.check_integrity()
    assert engine.stats().prefix_hits_total > 0
    assert engine.stats().preempted_total > 0
    for generation, each in zip(generations, requests, strict=True):
        assert generation.result(timeout=60).choices[0].token_ids == plain_tokens(each)


def test_damaged_values_are_not_found_by_later_jobs(
    make_engine: MakeEngine, loaded: Any, plain_tokens: Callable[..., tuple[int, ...]]
) -> None:
    model = NotedLogits(loaded.model)
    engine = make_engine(model=model)
    model.spoil = True
    with pytest.raises(InternalError, match="not finite"):
        engine.submit(request(STORY)).result(timeout=60)
    model.spoil = False
    again = engine.submit(request(STORY)).result(timeout=60)
    assert again.usage.cached == 0
    assert again.choices[0].token_ids == plain_tokens(request(STORY))


def test_a_failed_step_leaves_nothing_to_be_found(
    make_engine: MakeEngine,
    watched: Callable[..., Any],
    plain_tokens: Callable[..., tuple[int, ...]],
) -> None:
    def fail_once(step: int, batch: RaggedBatch) -> None:
        if step == 1:
            raise ValueError("a defect")

    engine = make_engine(model=watched(fail_once))
    with pytest.raises(InternalError):
        engine.submit(request(STORY)).result(timeout=60)
    assert engine.stats().kv_blocks_kept == 0
    again = engine.submit(request(STORY)).result(timeout=60)
    assert again.usage.cached == 0
    assert again.choices[0].token_ids == plain_tokens(request(STORY))
