"""Layers with a window keep no more than it: other blocks, and the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.device.graphs import DecodeGraphs
from llorch_worker.engine.device.queue import InlineQueue
from llorch_worker.engine.loading import LoadedModel as InMemory
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import LoadedModel, WatchedModel, load_exactly
from tests.engine.lazy_queue import LazyQueue
from tests.engine.random_company import (
    Job,
    other_tokens,
    random_requests,
    run_alone,
    run_in_company,
)
from tests.engine.recording import Recorder
from tests.engine.test_speculation import RightAndWrong, draft_by, with_free_rows
from tests.model.test_families import make_reference
from tests.sizes import sized

BLOCK, CONTEXT, VOCABULARY, WINDOW = 16, 512, 1536, 21
TIMEOUT_S = 120


@dataclass(frozen=True)
class Windowed:
    """A model of transformers with random weights, and the same model here."""

    reference: Any
    loaded: LoadedModel

    def chosen(self, ids: list[int]) -> list[int]:
        """The token that transformers chooses after each of ``ids``."""
        with torch.no_grad():
            chosen: list[int] = self.reference(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        return chosen


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def windowed(
    request: pytest.FixtureRequest, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Windowed:
    """Windows in six layers of seven, and in all."""
    reference = make_reference(
        request.param, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY
    )
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return Windowed(reference, load_exactly(folder, loaded.tokenizer))


@pytest.fixture(scope="module")
def jobs(windowed: Windowed) -> list[Job]:
    requests = random_requests(sized(usual=12, full=60), VOCABULARY, seed=5)
    with windowed.loaded.engine(prefix_caching=False) as engine:
        return run_alone(engine, requests)


@pytest.fixture
def engine(windowed: Windowed) -> Iterator[Engine]:
    """Of 24 blocks a window, or of three windows."""
    with windowed.loaded.engine(max_sequences=2, max_step_tokens=64) as engine:
        assert [window.total for window in engine.cache.windows] == [24]
        yield engine
        check_all_free(engine)


def check_all_free(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    for window in engine.cache.windows:
        window.check_integrity([0] * engine.cache.blocks.total)


def random_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def request(ids: list[int], **fields: Any) -> GenerationRequest:
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return GenerationRequest(prompt_token_ids=ids, **fields)


def test_greedy_tokens_over_many_windows_are_those_of_transformers(
    windowed: Windowed, engine: Engine
) -> None:
    ids = random_ids(250, seed=1)
    together = [
        engine.submit(request(ids[: 250 - cut], max_tokens=CONTEXT - 250)) for cut in (0, 100)
    ]
    for generation in together:
        result = generation.result(TIMEOUT_S)
        whole = [*ids[: result.usage.prompt], *result.choices[0].token_ids]
        assert whole[result.usage.prompt :] == windowed.chosen(whole)[result.usage.prompt - 1 : -1]


def test_no_sequence_holds_more_of_a_window_than_it_and_a_step_touch(windowed: Windowed) -> None:
    held: list[int] = []

    def count(step: int, batch: RaggedBatch) -> None:
        (window,) = engine.cache.windows
        blocks = range(engine.cache.blocks.total)
        held.append(sum(map(window.has, blocks)) - len(window._kept))

    model: Any = WatchedModel(windowed.loaded.model, count)
    with windowed.loaded.engine(model=model, max_sequences=1, max_step_tokens=48) as engine:
        engine.submit(request(random_ids(200, seed=2), max_tokens=200)).result(TIMEOUT_S)
        check_all_free(engine)
    assert max(held) <= -(-(WINDOW + 48) // BLOCK) + 1
    assert max(held[-190:]) <= -(-WINDOW // BLOCK) + 1


def test_a_long_text_that_a_grammar_forces_takes_no_more_of_a_window_than_a_step(
    windowed: Windowed,
) -> None:
    """Of 10 blocks; the whole text needs 18."""
    text = " ".join(["the dog ran to the park"] * 40)
    forced = request([5, 6], max_tokens=400, structured_outputs={"regex": f"{text} (yes|no)"})
    with windowed.loaded.engine(max_sequences=1, max_step_tokens=16) as engine:
        assert [window.total for window in engine.cache.windows] == [10]
        result = engine.submit(forced).result(TIMEOUT_S)
        assert result.choices[0].text in (f"{text} yes", f"{text} no")
        assert result.usage.completion > 17 * BLOCK
        check_all_free(engine)


@pytest.mark.parametrize("length", [40, 200, 203])
def test_a_found_prefix_gives_the_tokens_of_a_computed_one(
    windowed: Windowed, engine: Engine, length: int
) -> None:
    beginning = random_ids(length, seed=3)
    engine.submit(request(beginning, max_tokens=1)).result(TIMEOUT_S)
    ids = [*beginning, *random_ids(30, seed=4)]
    found = engine.submit(request(ids, max_tokens=60)).result(TIMEOUT_S)
    assert found.usage.cached == length // BLOCK * BLOCK
    tokens = list(found.choices[0].token_ids)
    assert tokens == windowed.chosen([*ids, *tokens])[len(ids) - 1 : -1]


def test_a_prefix_is_not_found_where_a_window_was_given_to_others(
    windowed: Windowed, engine: Engine
) -> None:
    """Though the other layers may have all of it."""
    ids = random_ids(200, seed=6)
    first = engine.submit(request(ids)).result(TIMEOUT_S)
    engine.submit(request(random_ids(400, seed=7))).result(TIMEOUT_S)
    blocks = engine.cache.blocks
    assert tuple(ids[:BLOCK]) in blocks.root.children
    again = engine.submit(request(ids)).result(TIMEOUT_S)
    assert again.usage.cached == 0
    assert again.choices == first.choices
    # It is found again now: what was computed last has the windows.
    assert engine.submit(request(ids)).result(TIMEOUT_S).usage.cached == 192


def test_choices_share_the_blocks_of_their_prompt(windowed: Windowed, engine: Engine) -> None:
    ids = random_ids(150, seed=8)
    generation = engine.submit(request(ids, n=4, max_tokens=70, temperature=1, seed=9))
    choices = generation.result(TIMEOUT_S).choices
    assert engine.stats().cached_tokens_total == 3 * 144
    with windowed.loaded.engine(prefix_caching=False, max_sequences=1) as plain:
        alone = plain.submit(generation.request).result(TIMEOUT_S)
    assert alone.choices == choices


def test_recorded_steps_read_the_windows_of_their_own_sequences(windowed: Windowed) -> None:
    loaded, recorder = windowed.loaded, Recorder()
    sizes = {"max_sequences": 3, "max_step_tokens": 64, "decode_rows": 3}
    cache = loaded.cache(100, **sizes)
    requests = [request(random_ids(20 + 30 * i, seed=i), max_tokens=60 + 20 * i) for i in range(4)]
    with Engine(
        InMemory(loaded.model, cache, DecodeGraphs(loaded.model, cache, recorder)),
        tokenizer=loaded.tokenizer,
        model_name="windowed",
        options=EngineOptions(max_sequences=3, max_step_tokens=64),
    ) as engine:
        generations = [engine.submit(each) for each in requests]
        for generation, each in zip(generations, requests, strict=True):
            tokens = list(generation.result(TIMEOUT_S).choices[0].token_ids)
            ids = list(each.prompt_token_ids or ())
            assert tokens == windowed.chosen([*ids, *tokens])[len(ids) - 1 : -1]
        check_all_free(engine)
    assert recorder.replayed > 50


@settings(
    max_examples=sized(usual=4, full=50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([32, 40, 100, 400]),
    max_sequences=st.sampled_from([1, 3, 8]),
    max_step_tokens=st.sampled_from([5, 32, 200]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    overlaps=st.booleans(),
)
def test_company_changes_no_token_and_leaks_no_block(
    windowed: Windowed,
    jobs: list[Job],
    seed: int,
    num_blocks: int,
    max_sequences: int,
    max_step_tokens: int,
    prefix_caching: bool,
    overlaps: bool,
) -> None:
    """Arrivals, priorities, choices, cancels, resumed jobs and, in small pools, preemption."""
    rng = random.Random(seed)
    chosen = [
        replace(job, request=job.request.model_copy(update={"priority": priority}))
        for job in rng.sample(jobs, 10)
        for priority in [rng.choice(["high", "normal", "low"])]
    ]
    with windowed.loaded.engine(
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        prefix_caching=prefix_caching,
        queue=LazyQueue() if overlaps else InlineQueue(),
    ) as engine:
        assert other_tokens(chosen, run_in_company(engine, chosen, seed)) == []
        check_all_free(engine)


def test_drafts_over_windows_change_no_token_and_leak_no_block(windowed: Windowed) -> None:
    loaded = windowed.loaded
    ids = random_ids(90, seed=4)
    requests = [request(ids[cut:], max_tokens=200) for cut in (0, 30, 60)]
    sizes = {"max_sequences": 3, "max_step_tokens": 64}
    with loaded.engine(num_blocks=100, drafter="lookup", **sizes) as engine:
        off = [each.model_copy(update={"speculation": "off"}) for each in requests]
        answers = [engine.submit(each).result(TIMEOUT_S).choices for each in off]
        texts = [
            [*(each.prompt_token_ids or ()), *choice.token_ids]
            for each, (choice,) in zip(requests, answers, strict=True)
        ]
        draft_by(with_free_rows(engine), RightAndWrong(texts, seed=4))
        jobs = [engine.submit(each) for each in requests]
        for job, answer in zip(jobs, answers, strict=True):
            result = job.result(TIMEOUT_S)
            assert result.choices == answer
            assert result.usage.accepted_draft_tokens > 100
        check_all_free(engine)
