"""A load for a running engine, timed at its steps and at the delivery of its tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from llorch_worker.bench.instruments.watched_model import Step, WatchedModel
from llorch_worker.bench.load import Load
from llorch_worker.contract import Event, GenerationRequest, Tokens
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.engine import Engine

WARM_UP_TOKENS = 2
"""Enough to run the shapes of prefill and of decode once."""


@dataclass(frozen=True)
class DecodePhase:
    """Consecutive steps in which all requests of a pass decode and none prefills; at least two."""

    steps: tuple[Step, ...]

    @property
    def step_s(self) -> float:
        """The mean time from the start of one forward pass to the start of the next."""
        return (self.steps[-1].began_s - self.steps[0].began_s) / (len(self.steps) - 1)

    @property
    def mean_context_tokens(self) -> float:
        sequences = sum(step.sequences for step in self.steps)
        return sum(step.kv_tokens for step in self.steps) / sequences

    @property
    def outside_model_s(self) -> list[float]:
        """For each step, the time between its forward pass and the next: sampler, scheduler,
        detokeniser, events, and laying out the next batch."""
        return [late.began_s - early.ended_s for early, late in pairwise(self.steps)]


@dataclass(frozen=True)
class Pass:
    """One run of a load, from submission to the last token; durations in seconds."""

    load: Load
    token_times_s: tuple[tuple[float, ...], ...]
    """For each request, the delivery times of its tokens, in seconds since submission."""
    steps: tuple[Step, ...]
    preemptions: int

    @property
    def wall_s(self) -> float:
        return max(times[-1] for times in self.token_times_s)

    @property
    def first_token_s(self) -> list[float]:
        return [times[0] for times in self.token_times_s]

    @property
    def between_tokens_s(self) -> list[float]:
        """Gaps between the tokens of each request; a neighbour's prefill counts."""
        return [late - early for times in self.token_times_s for early, late in pairwise(times)]

    def decode_phase(self) -> DecodePhase | None:
        """The decode; None if it is shorter than two steps or a request was preempted."""
        all_of_them = self.load.jobs
        steps = tuple(s for s in self.steps if s.tokens == s.sequences == all_of_them)
        return None if len(steps) < 2 or self.preemptions else DecodePhase(steps)


def run_pass(engine: Engine, watched: WatchedModel, load: Load) -> Pass:
    """Run the load; the clock starts once all requests are submitted. The engine must be idle."""
    times: list[list[float]] = [[] for _ in range(load.jobs)]

    def note(request: int, event: Event) -> None:
        if isinstance(event, Tokens) and event.ids:
            times[request].append(time.perf_counter())

    requests = load.requests(engine.config.vocab_size)
    preempted_before = engine.stats().preempted_total
    with _busy(engine):
        watched.take_steps()
        generations = [
            engine.submit(request, on_event=partial(note, number))
            for number, request in enumerate(requests)
        ]
        began_s = time.perf_counter()
    for generation in generations:
        generation.result()
    return Pass(
        load=load,
        token_times_s=tuple(tuple(at - began_s for at in each) for each in times),
        steps=watched.take_steps(),
        preemptions=engine.stats().preempted_total - preempted_before,
    )


@contextmanager
def _busy(engine: Engine) -> Iterator[None]:
    """Keep the idle engine busy, so that everything submitted meanwhile starts together.

    Otherwise the first request would prefill alone, and figures would depend on how fast the
    others follow.
    """
    holding, released = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, TERMINAL_EVENTS):
            holding.set()
            released.wait()

    engine.submit(GenerationRequest(prompt_token_ids=[0], max_tokens=1), on_event=hold)
    holding.wait()
    try:
        yield
    finally:
        released.set()
