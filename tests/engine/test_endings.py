"""Cancel, deadline, close, and a failing callback: each ends its own job and no other."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Event,
    Finished,
    GenerationRequest,
    InternalError,
    Tokens,
)
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.engine import Engine, Generation
from tests.engine.conftest import continuation
from tests.engine.together import all_at_once
from tests.waiting import wait_until

PROMPT = "Once upon a time"
LONG = [7] * 300


def request(**fields: Any) -> GenerationRequest:
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    if "prompt_token_ids" in fields:
        del fields["prompt"]
    return GenerationRequest(**fields)


def endings(generation: Generation) -> list[type[Event]]:
    return [type(e) for e in generation.events() if isinstance(e, TERMINAL_EVENTS)]


def test_a_cancelled_job_gives_no_further_token_and_its_blocks_are_free(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    events: list[Event] = []
    free: list[int] = []
    submitted = threading.Event()

    def cancel_at_the_fifth_token(event: Event) -> None:
        events.append(event)
        assert submitted.wait(60)
        if isinstance(event, Tokens) and event.index == 4:
            generation.cancel()
        if isinstance(event, CancelledEvent):
            free.append(engine.stats().kv_blocks_free)

    generation = engine.submit(request(max_tokens=200), on_event=cancel_at_the_fifth_token)
    submitted.set()
    with pytest.raises(Cancelled):
        generation.result(timeout=60)
    assert sum(isinstance(event, Tokens) for event in events) == 5
    assert isinstance(events[-1], CancelledEvent)
    assert free == [engine.stats().kv_blocks_total]


@pytest.mark.parametrize("at", [1, 3, 12], ids=["waiting", "in mid-prefill", "decoding"])
def test_a_cancel_takes_effect_before_the_next_step_is_launched(
    make_engine: Callable[..., Engine],
    make_queue: Callable[[], Any],
    watched: Callable[..., Any],
    gate: Callable[..., Any],
    at: int,
) -> None:
    hold = gate(at=at)
    model = watched(hold)
    engine = make_engine(model=model, max_step_tokens=64, max_sequences=1 if at == 1 else 4)
    with all_at_once(engine):
        neighbour = engine.submit(request(max_tokens=20))
        generation = engine.submit(request(prompt_token_ids=LONG, max_tokens=100))
    hold.wait_until_reached()
    generation.cancel()
    generation.cancel()
    hold.open()
    with pytest.raises(Cancelled):
        generation.result(timeout=60)
    assert endings(generation) == [CancelledEvent]
    assert neighbour.result(timeout=60).usage.completion == 20
    # After the step in which the cancel came, and one that may have been launched by then, the
    # neighbour has every step to itself.
    launched = at + 1 if make_queue().overlaps else at
    assert all(step == (1,) for step in model.steps[launched:])


def test_cancelling_a_finished_job_changes_nothing(engine: Engine) -> None:
    generation = engine.submit(request(max_tokens=3))
    result = generation.result(timeout=60)
    generation.cancel()
    engine.check_integrity()
    assert generation.result(timeout=60) is result
    assert endings(generation) == [Finished]


def test_a_deadline_keeps_the_tokens_generated_so_far(
    make_engine: Callable[..., Engine], watched: Callable[..., Any]
) -> None:
    generations: list[Generation] = []
    submitted = threading.Event()

    def wait_for_the_deadline(step: int, batch: object) -> None:
        if step == 4:
            assert submitted.wait(60)
            deadline_s = generations[0].deadline_s
            assert deadline_s is not None
            threading.Event().wait(max(0.0, deadline_s - time.monotonic()))

    engine = make_engine(model=watched(wait_for_the_deadline))
    generations.append(engine.submit(request(max_tokens=200, deadline_s=0.5, n=2)))
    neighbour = engine.submit(request(max_tokens=50))
    submitted.set()
    result = generations[0].result(timeout=60)
    whole = neighbour.result(timeout=60)
    assert whole.choices[0].finish_reason == "length"
    for choice in result.choices:
        assert choice.finish_reason == "deadline"
        assert choice.token_ids == whole.choices[0].token_ids[: len(choice.token_ids)]
        assert choice.text == continuation(engine.tokenizer, choice.token_ids)
    assert 0 < len(result.choices[0].token_ids) <= 4
    assert endings(generations[0]) == [Finished]


def test_a_deadline_that_passed_in_the_queue_ends_without_a_step(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    late = engine.submit(request(deadline_s=10, max_tokens=50), queued_at=time.time() - 60)
    result = late.result(timeout=60)
    assert result.choices[0].finish_reason == "deadline"
    assert (result.text, result.choices[0].token_ids) == ("", ())
    assert engine.stats().steps_total == 0


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_deadline_that_passes_after_the_end_changes_nothing(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], cancelled: bool
) -> None:
    early: list[Generation] = []
    submitted = threading.Event()

    def outlast_the_deadline(step: int, batch: object) -> None:
        assert submitted.wait(60)
        if early[0].done and early[0].deadline_s is not None:
            threading.Event().wait(max(0.0, early[0].deadline_s - time.monotonic()))

    engine = make_engine(model=watched(outlast_the_deadline))
    early.append(engine.submit(request(max_tokens=3 if not cancelled else 99, deadline_s=0.7)))
    neighbour = engine.submit(request(max_tokens=20))
    if cancelled:
        early[0].cancel()
    submitted.set()
    neighbour.result(timeout=60)
    assert len([e for e in early[0]._events if isinstance(e, TERMINAL_EVENTS)]) == 1


def test_a_failing_callback_cancels_only_its_own_job(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()

    def broken(event: Event) -> None:
        raise ValueError("the reader is gone")

    with all_at_once(engine):
        generation = engine.submit(request(max_tokens=200), on_event=broken)
        neighbour = engine.submit(request(max_tokens=30))
    with pytest.raises(Cancelled):
        generation.result(timeout=60)
    assert neighbour.result(timeout=60).usage.completion == 30


def test_the_callback_gets_the_terminal_event_before_the_result_is_ready(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    seen: list[bool] = []
    submitted = threading.Event()

    def note(event: Event) -> None:
        assert submitted.wait(60)
        if isinstance(event, Finished):
            seen.append(generation.done)

    generation = engine.submit(request(max_tokens=2), on_event=note)
    submitted.set()
    generation.result(timeout=60)
    assert seen == [False]


def test_a_job_goes_on_when_waiting_for_its_result_times_out(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], gate: Callable[..., Any]
) -> None:
    hold = gate(at=1)
    engine = make_engine(model=watched(hold))
    generation = engine.submit(request(max_tokens=3))
    with pytest.raises(TimeoutError, match=generation.id):
        generation.result(timeout=0)
    hold.open()
    assert generation.result(timeout=60).usage.completion == 3


def test_each_reader_gets_all_events(engine: Engine) -> None:
    generation = engine.submit(request(max_tokens=10))
    early = generation.events()
    next(early)
    everything = list(generation.events())
    assert list(early) == everything[1:]
    assert list(generation.events()) == everything


def test_closing_cancels_running_jobs_and_refuses_new_ones(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], gate: Callable[..., Any]
) -> None:
    hold = gate(at=3)
    engine = make_engine(model=watched(hold), max_sequences=1)
    generations = [engine.submit(request(max_tokens=100)) for _ in range(3)]
    hold.wait_until_reached()
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: not engine.healthy, what="the engine to close")
    hold.open()
    closing.join(60)
    for generation in generations:
        assert endings(generation) == [CancelledEvent]
    assert not engine.healthy
    engine.close()
    with pytest.raises(InternalError, match="closed"):
        engine.submit(request())
    with pytest.raises(InternalError, match="closed"):
        engine.logits([1])


def test_the_engine_forgets_a_finished_job_before_its_deadline(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    generation = engine.submit(request(max_tokens=1, deadline_s=86_400))
    generation.result(timeout=60)
    engine.check_integrity()
    forgotten = weakref.ref(generation)
    del generation
    gc.collect()
    assert forgotten() is None
