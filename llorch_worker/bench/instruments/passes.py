"""Loads for a running engine, timed where it computes its steps and delivers its tokens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from llorch_worker.bench.instruments.watched_model import Step, WatchedModel
from llorch_worker.contract import Event, GenerationRequest, Tokens
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.engine import Engine


@dataclass(frozen=True)
class Load:
    """Requests that are submitted together; greedy at temperature 0."""

    prompt_tokens: int
    new_tokens: int
    concurrency: int
    temperature: float
    seed: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What each request asks for besides."""

    def requests(self, vocab_size: int) -> list[GenerationRequest]:
        """Random prompts, all different, so that no cache can know one from another."""
        chance = random.Random(self.seed)
        return [
            GenerationRequest(
                prompt_token_ids=[chance.randrange(vocab_size) for _ in range(self.prompt_tokens)],
                max_tokens=self.new_tokens,
                ignore_eos=True,
                temperature=self.temperature,
                seed=chance.randrange(2**31),
                **self.fields,
            )
            for _ in range(self.concurrency)
        ]


@dataclass(frozen=True)
class DecodePhase:
    """The steps of a pass in which all its requests decode and none prefills, in a row."""

    steps: tuple[Step, ...]

    @property
    def sequences(self) -> int:
        return self.steps[0].sequences

    @property
    def step_s(self) -> float:
        """From the start of one forward pass to that of the next: all that a step takes."""
        return (self.steps[-1].began_s - self.steps[0].began_s) / (len(self.steps) - 1)

    @property
    def mean_context_tokens(self) -> float:
        return sum(step.kv_tokens for step in self.steps) / (len(self.steps) * self.sequences)

    @property
    def outside_model_s(self) -> list[float]:
        """For each step, what passes between its forward pass and the next: sampler, scheduler,
        detokeniser, events, and putting the next batch together."""
        return [late.began_s - early.ended_s for early, late in pairwise(self.steps)]


@dataclass(frozen=True)
class Pass:
    """One load from its submission to its last token; durations in seconds."""

    load: Load
    token_times_s: tuple[tuple[float, ...], ...]
    """For each request, when each of its tokens was delivered, from the submission on."""
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
        """Gaps between the tokens of each request, a neighbour's prefill included."""
        return [late - early for times in self.token_times_s for early, late in pairwise(times)]

    @property
    def peak_kv_blocks(self) -> int:
        return max(step.kv_blocks for step in self.steps)

    def decode_phase(self) -> DecodePhase | None:
        """None where it has not two steps, or some request was preempted."""
        steps = tuple(
            step
            for step in self.steps
            if step.decodes_only and step.sequences == self.load.concurrency
        )
        return None if len(steps) < 2 or self.preemptions else DecodePhase(steps)


def run_pass(engine: Engine, watched: WatchedModel, load: Load) -> Pass:
    """Runs the load from the moment when all its requests are in. The engine must be idle."""
    times: list[list[float]] = [[] for _ in range(load.concurrency)]

    def note(request: int, event: Event) -> None:
        if isinstance(event, Tokens) and event.ids:
            times[request].append(time.perf_counter())

    requests = load.requests(engine.config.vocab_size)
    preempted_before = engine.stats().preempted_total
    with _held(engine):
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
def _held(engine: Engine) -> Iterator[None]:
    """Keeps the idle engine waiting, so that what is submitted meanwhile starts together.

    Else the first request would prefill alone, and the figures hang on the submitter's speed.
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
