"""Sampled jobs, run alone and then among neighbours that come and go, some resumed half-way."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.contract import Choice, Event, GenerationRequest, read_journal
from llorch_worker.contract.events import Tokens
from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.kernels import native_absence

SHARED_BEGINNINGS = 5
LONGEST_PROMPT = 330
LONGEST_ANSWER = 40
MOST_AT_ONCE = 12
RESUMED_SHARE = 0.1
CANCELLED_SHARE = 0.1
TIMEOUT_S = 120

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("f32.gguf", {"dtype": "float32"}),
    "float32, int8 cache": ("f32.gguf", {"dtype": "float32", "kv_dtype": "int8"}),
    "float32, fp8 cache": ("f32.gguf", {"dtype": "float32", "kv_dtype": "fp8"}),
    "bfloat16 on torch": (
        "f32.gguf",
        {"dtype": "bfloat16", "kernels": "torch", "batch_invariant": True},
    ),
    "native products, torch's attention": (
        "q8_0.gguf",
        {"dtype": "bfloat16", "batch_invariant": True},
    ),
    "native": ("demo", {"dtype": "bfloat16"}),
    "native, int8 cache": ("demo", {"dtype": "bfloat16", "kv_dtype": "int8"}),
    "native, fp8 cache": ("demo", {"dtype": "bfloat16", "kv_dtype": "fp8"}),
}
"""Kinds of kernels and caches in which a job's bits do not depend on its company."""

Answer = tuple[Choice, ...]


@dataclass(frozen=True)
class Job:
    """A request, its events when it ran alone, and what it answered then."""

    request: GenerationRequest
    events: list[Event]
    answer: Answer


def model_and_options(way: str, trained: Path, demo: Path) -> tuple[Path, dict[str, Any]]:
    """What to load for one of :data:`WAYS`. Skips the test where its kernels are not."""
    name, options = WAYS[way]
    if "native" in way and (absence := native_absence()) is not None:
        pytest.skip(absence)
    return demo if name == "demo" else trained / name, options


def random_requests(count: int, vocab_size: int, seed: int) -> Iterator[GenerationRequest]:
    """Mostly short prompts of random ids, some of which begin alike; most are sampled."""
    rng = random.Random(seed)
    # Ids from 3 on: the first ones are special.
    beginnings = [
        [rng.randrange(3, vocab_size) for _ in range(rng.randint(10, 120))]
        for _ in range(SHARED_BEGINNINGS)
    ]
    for _ in range(count):
        begin = rng.choice([[], rng.choice(beginnings)])
        most = LONGEST_PROMPT if rng.random() < 0.15 else 60
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, most))]
        yield GenerationRequest(
            prompt_token_ids=[*begin, *own],
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            temperature=rng.choice([0, 0.7, 1.0, 1.0]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            top_k=rng.choice([0, 0, 20]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
            seed=rng.randrange(2**31),
            n=rng.choice([1, 1, 1, 2]),
            # Log probabilities show differences that change no token.
            logprobs=0,
            ignore_eos=True,
        )


def run_alone(engine: Engine, requests: Iterator[GenerationRequest]) -> list[Job]:
    jobs = []
    for request in requests:
        generation = engine.submit(request)
        choices = generation.result(timeout=TIMEOUT_S).choices
        jobs.append(Job(request, list(generation.events()), choices))
    return jobs


def run_in_company(engine: Engine, jobs: list[Job], seed: int) -> list[Answer]:
    """The jobs' answers when a random number of them runs at once.

    A tenth continues after a random event of its run alone. Others are joined by a neighbour that
    is cancelled.
    """
    rng = random.Random(seed)
    running: deque[Generation] = deque()
    answers: list[Answer] = []
    at_once = 1
    for job in jobs:
        journal = None
        if rng.random() < RESUMED_SHARE:
            tokens = [event for event in job.events if isinstance(event, Tokens)]
            journal = read_journal(tokens[: rng.randrange(len(tokens))])
        running.append(engine.submit(job.request, journal=journal))
        if rng.random() < CANCELLED_SHARE:
            engine.submit(rng.choice(jobs).request).cancel()
        while len(running) >= at_once:
            answers.append(running.popleft().result(timeout=TIMEOUT_S).choices)
            at_once = rng.randint(1, MOST_AT_ONCE)
    return answers + [generation.result(timeout=TIMEOUT_S).choices for generation in running]


def other_tokens(jobs: list[Job], answers: list[Answer]) -> list[int]:
    """The numbers of the jobs that answered other tokens than alone."""
    return [
        number
        for number, (job, answer) in enumerate(zip(jobs, answers, strict=True))
        if [c.token_ids for c in job.answer] != [c.token_ids for c in answer]
    ]


def other_bits(jobs: list[Job], answers: list[Answer]) -> list[int]:
    """The numbers of the jobs whose tokens or log probabilities differ in any bit from alone."""
    return [
        number
        for number, (job, answer) in enumerate(zip(jobs, answers, strict=True))
        if job.answer != answer
    ]
