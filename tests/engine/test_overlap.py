"""Steps launched before the tokens of the previous step are known.

The device of these tests computes nothing before its result is awaited (see ``LazyQueue``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from llorch_worker.contract import Event, Finished, GenerationRequest, InternalError, Tokens
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.engine import Engine, Generation
from llorch_worker.engine.device.queue import Forward
from llorch_worker.kernels import torch_ops
from llorch_worker.model import RaggedBatch
from tests.engine.lazy_queue import LazyQueue
from tests.engine.no_host_reads import (
    SETTLED_STEPS,
    AtOnce,
    DeviceMemory,
    FreeForward,
    launch_without_host_reads,
    watch_memory,
)
from tests.engine.test_speculation import with_free_rows
from tests.engine.together import all_at_once

PROMPT = "Once upon a time"


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 20, **fields}
    )


@pytest.fixture
def queue() -> LazyQueue:
    return LazyQueue()


@pytest.fixture
def engine_of(loaded: Any, queue: LazyQueue) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(loaded.engine(queue=queue, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    assert queue.unread == 0


@pytest.fixture(scope="module")
def expected(loaded: Any) -> tuple[int, ...]:
    with loaded.engine() as engine:
        ids: tuple[int, ...] = engine.submit(request()).result(60).choices[0].token_ids
        return ids


def test_each_step_is_launched_before_the_one_before_it_is_read(
    engine_of: Callable[..., Engine], queue: LazyQueue, expected: tuple[int, ...]
) -> None:
    generation = engine_of().submit(request())
    assert generation.result(60).choices[0].token_ids == expected
    assert queue.unread_at_launch == [0] + [1] * 19


def test_at_most_two_steps_are_launched_and_unread(
    engine_of: Callable[..., Engine], queue: LazyQueue
) -> None:
    engine = engine_of(max_sequences=3)
    with all_at_once(engine):
        generations = [engine.submit(request(max_tokens=5 + 7 * index)) for index in range(7)]
    assert [g.result(60).usage.completion for g in generations] == [5 + 7 * i for i in range(7)]
    assert queue.most_unread == 2


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1, "top_k": 5},
    {"temperature": 1, "min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "temperature": 1},
    {"frequency_penalty": 0.5},
    {"logit_bias": {5: 1.0}},
    {"min_tokens": 3, "ignore_eos": False},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "[a-z ]+"}},
    {"structured_outputs": {"json": {"properties": {"a_long_name": {"enum": ["of text"]}}}}},
]


@pytest.mark.parametrize("fields", SAMPLINGS, ids=lambda fields: next(iter(fields)))
def test_no_parameter_prevents_overlap(
    engine_of: Callable[..., Engine], queue: LazyQueue, loaded: Any, fields: dict[str, Any]
) -> None:
    engine = engine_of()
    generation = engine.submit(request(seed=3, **fields))
    with loaded.engine() as plain:
        expected = plain.submit(request(seed=3, **fields)).result(60).choices
    assert generation.result(60).choices == expected
    assert queue.unread_at_launch[1:] == [1] * (len(queue.unread_at_launch) - 1)


def test_every_parameter_in_company_overlaps_beside_prefills_and_gives_the_same_tokens(
    engine_of: Callable[..., Engine], queue: LazyQueue, loaded: Any
) -> None:
    """Sequences come and go, so that penalties are made while a token is on its way."""
    requests = [
        request(
            prompt=f"{PROMPT} {'there was a dog ' * index}",
            **{"max_tokens": 9 + 5 * index, "seed": index, **fields},
        )
        for index, fields in enumerate(SAMPLINGS)
    ]
    with loaded.engine() as plain:
        expected = [plain.submit(each).result(60).choices[0].token_ids for each in requests]
    engine = engine_of(max_sequences=4, max_step_tokens=24)
    with all_at_once(engine):
        generations = [engine.submit(each) for each in requests]
    assert [each.result(60).choices[0].token_ids for each in generations] == expected
    steps = len(queue.unread_at_launch)
    assert queue.unread_at_launch.count(1) > 0.9 * steps


KINDS: list[dict[str, Any]] = [
    *SAMPLINGS,
    {},
    {"temperature": 1, "n": 2},
    {"prompt_logprobs": 2},
    {"prompt": "Lily likes the park. Lily likes the park. Lily likes the"},
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("drafter", ["off", "lookup"])
def test_no_step_makes_the_host_wait_before_it_is_read(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, drafter: str, fused: bool
) -> None:
    """Alone, and in company that comes and goes, with prefills beside decodes."""
    requests = [request(seed=index, **fields) for index, fields in enumerate(KINDS)]
    with loaded.engine() as plain:
        expected = [ids_of(plain.submit(each)) for each in requests]
    if fused:
        select = "llorch_worker.engine.engine.select_sample"
        monkeypatch.setattr(select, lambda *_: torch_ops.sample)
    launch_without_host_reads(monkeypatch)
    options: dict[str, Any] = {"max_sequences": 5, "max_step_tokens": 24, "drafter": drafter}
    model = FreeForward(loaded.model)
    with loaded.engine(queue=AtOnce(), model=model, **options) as engine:
        if drafter != "off":
            with_free_rows(engine)
        assert [ids_of(engine.submit(each)) for each in requests] == expected
        with all_at_once(engine):
            generations = [engine.submit(each) for each in requests]
        assert [ids_of(each) for each in generations] == expected
        assert engine.stats().drafts_total > 0 or drafter == "off"


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_the_same_sequences_ask_the_card_for_no_memory(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """Outside the forward pass, whose buffers a card has from its recordings."""
    if fused:
        select = "llorch_worker.engine.engine.select_sample"
        monkeypatch.setattr(select, lambda *_: torch_ops.sample)
    # A grammar's forced tokens take rows of their own.
    kinds = [each for each in KINDS if "structured_outputs" not in each]
    kinds.append({"structured_outputs": {"regex": "[a-z ]+"}})
    requests = [request(seed=i, **{"max_tokens": 30, **each}) for i, each in enumerate(kinds)]
    launches = watch_memory(monkeypatch)
    model = FreeForward(loaded.model)
    with loaded.engine(queue=AtOnce(), model=model, max_sequences=16, drafter="off") as engine:
        with all_at_once(engine):
            generations = [engine.submit(each) for each in requests]
        for each in generations:
            each.result(60)
    settled = [asked for same, asked in launches if same > SETTLED_STEPS]
    assert len(settled) > 10
    assert settled == [[]] * len(settled)
    assert [asked for _, asked in launches if asked]


def test_the_stand_in_asks_for_each_block_that_is_kept() -> None:
    memory = DeviceMemory()
    with memory:
        kept = [torch.empty(200) for _ in range(2)]
        assert len(memory.asked) == 2
        kept.pop()
        kept.append(torch.empty(210))  # of the same size in blocks
        kept[0].view(100, 2).add_(1)
        assert len(memory.asked) == 2
        kept.append(torch.empty(200) + 1)
        assert len(memory.asked) == 4


def ids_of(generation: Any) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in generation.result(60).choices]


def test_a_token_computed_after_the_end_is_discarded(
    engine_of: Callable[..., Engine], queue: LazyQueue, expected: tuple[int, ...]
) -> None:
    """And no token comes twice."""
    events: list[Event] = []
    engine = engine_of()
    stop = next(i for i in range(3, 20) if expected[i] not in expected[:i])
    with all_at_once(engine):
        neighbour = engine.submit(request())
        generation = engine.submit(request(stop_token_ids=[expected[stop]]), on_event=events.append)
    result = generation.result(60)
    assert result.choices[0].finish_reason == "stop"
    assert result.choices[0].token_ids == expected[: stop + 1]
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.index for event in tokens] == list(range(stop + 1))
    assert neighbour.result(60).choices[0].token_ids == expected
    assert queue.most_unread == 2
    assert engine.stats().completion_tokens_total == 20 + stop + 1


def test_a_step_writes_only_to_blocks_that_are_still_held(
    engine_of: Callable[..., Engine], watched: Callable[..., Any]
) -> None:
    """Also if its sequence ended after the launch, and others wait for blocks."""
    engines: list[Engine] = []

    def check(step: int, batch: RaggedBatch) -> None:
        pool = engines[0].cache.blocks
        written = (batch.places[0].slots // engines[0].cache.block_size).tolist()
        assert all(pool.holders(block) == 1 for block in written)
        assert all(pool.contents(block) is None for block in written)

    engines.append(engine_of(model=watched(check), num_blocks=12))
    with all_at_once(engines[0]):
        generations = [
            engines[0].submit(request(max_tokens=60, stop=[stop]))
            for stop in ("a", "the", ".", "was", "e", "She")
            for _ in range(3)
        ]
    for generation in generations:
        generation.result(60)


def test_a_new_job_starts_while_others_run_ahead(
    engine_of: Callable[..., Engine], queue: LazyQueue
) -> None:
    engine = engine_of()
    another = StartsAnother(lambda: engine.submit(request(max_tokens=3)))
    long = engine.submit(request(max_tokens=300), on_event=another)
    assert long.result(60).usage.completion == 300
    assert another.started is not None
    assert another.started.result(60).usage.completion == 3
    assert queue.most_unread == 2


class StartsAnother:
    """Submits another job from the callback of the tenth token."""

    def __init__(self, submit: Callable[[], Any]) -> None:
        self.submit = submit
        self.started: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tokens) and event.index >= 10 and not self.started:
            self.started = self.submit()


class DamagedAt:
    """NaN in the last row of one decode step of two."""

    def __init__(self, model: Any, at: int) -> None:
        self.model = model
        self.at = at
        self.decodes = 0

    def forward(self, batch: RaggedBatch, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(batch, cache)
        if batch.query_lengths == (1, 1):
            self.decodes += 1
            if self.decodes == self.at:
                logits[1] = math.nan
        return logits


def test_non_finite_logits_fail_the_job_of_their_row_in_their_step(
    engine_of: Callable[..., Engine], loaded: Any, queue: LazyQueue, expected: tuple[int, ...]
) -> None:
    engine = engine_of(model=DamagedAt(loaded.model, at=6))
    events: list[Event] = []
    with all_at_once(engine):
        first = engine.submit(request())
        second = engine.submit(request(), on_event=events.append)
    with pytest.raises(InternalError, match="not finite"):
        second.result(60)
    assert first.result(60).choices[0].token_ids == expected
    told = [token for event in events if isinstance(event, Tokens) for token in event.ids]
    assert told == list(expected[: len(told)])
    assert len(told) < 20
    assert queue.most_unread == 2


def test_running_out_of_memory_in_a_step_launched_ahead_loses_no_token(
    engine_of: Callable[..., Engine],
    watched: Callable[..., Any],
    queue: LazyQueue,
    expected: tuple[int, ...],
) -> None:
    def run_out(step: int, batch: RaggedBatch) -> None:
        if step in (6, 11) and len(batch.query_lengths) > 1:
            raise MemoryError

    engine = engine_of(model=watched(run_out))
    with all_at_once(engine):
        generations = [engine.submit(request()) for _ in range(3)]
    assert [g.result(60).choices[0].token_ids for g in generations] == [expected] * 3
    assert queue.most_unread == 2


class RefusingQueue(LazyQueue):
    """Runs out of memory at one launch ahead, as a card may."""

    def launch(self, forward: Forward) -> Any:
        if self.unread and len(self.unread_at_launch) == 5:
            self.unread_at_launch.append(self.unread)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().launch(forward)


def test_an_error_of_the_step_launched_ahead_does_not_fail_the_previous_one(
    loaded: Any, expected: tuple[int, ...]
) -> None:
    with loaded.engine(queue=RefusingQueue()) as engine:
        # Two sequences of one request: both are there from the first step on.
        choices = engine.submit(request(n=2)).result(60).choices
        assert [choice.token_ids for choice in choices] == [expected] * 2
        engine.check_integrity()
        assert engine.stats().preempted_total == 1


def test_a_job_that_ends_in_the_step_ahead_of_two_deadlines_ends_once(
    engine_of: Callable[..., Engine], watched: Callable[..., Any]
) -> None:
    generations: list[Generation] = []

    def let_both_pass(step: int, _: object) -> None:
        if step == 4:
            # The next one is launched, and gives the second job its last token.
            for age_s, generation in zip((2, 1), generations, strict=True):
                generation.deadline_s = time.monotonic() - age_s

    engine = engine_of(model=watched(let_both_pass))
    with all_at_once(engine):
        for most in (20, 5):
            generations.append(engine.submit(request(max_tokens=most, deadline_s=86_400)))
    cut, whole = (each.result(60).choices[0] for each in generations)
    assert (cut.finish_reason, len(cut.token_ids)) == ("deadline", 4)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 5)
    engine.check_integrity()
    for each in generations:
        assert [type(e) for e in each._events if isinstance(e, TERMINAL_EVENTS)] == [Finished]
    assert engine.stats().finished_total == 2
