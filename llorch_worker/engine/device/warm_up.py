"""The warm-up before the first job, so that no job waits for a compiler or for memory.

Three numbers decide which kernel variants a step uses: its tokens, the longest piece of a prompt in
it, and how many sequences decode or need logits. Kernels round each up to a power of two, so steps
at the powers of two and at the maximum compile all variants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.request import MAX_CHOICES
from llorch_worker.engine.generation import Generation
from llorch_worker.model import ForwardModel, RaggedBatch

FIRST_TOKENS = 2
FULL_WIDTH_TOKENS = 8
TIMEOUT_S = 600.0
DIVIDED_TOKENS = 1025
"""A context of several pieces, which another kernel joins."""
MEASURED_S = 0.05
"""For how long steps of each size are measured, at least two of them."""
SLOW_S = 0.5
"""A step that takes so long is measured once: a worker's start must not wait for more."""


def compiles_late(device: torch.device) -> bool:
    """Whether kernels on ``device`` are compiled when a step first needs them."""
    return device.type == "cuda"


def compile_kernels(
    model: ForwardModel,
    cache: UnifiedCache,
    max_sequences: int,
    max_step_tokens: int,
    scored_rows: int,
) -> None:
    """Runs every size of step through ``model``. Prompts need at most ``scored_rows`` rows of
    logits at once.

    All write to the cache's first block, which no sequence may hold or have published.
    """
    for tokens in sizes(max_step_tokens):
        logits = min(tokens, scored_rows)
        model.forward(_batch(_prompts(tokens, cache.max_context), logits, cache), cache)
    for sequences in sizes(min(max_sequences, max_step_tokens)):
        model.forward(_batch((1,) * sequences, sequences, cache), cache)
    model.forward(_batch((1,), 1, cache, min(DIVIDED_TOKENS, cache.max_context)), cache)


def measure_steps(model: ForwardModel, cache: UnifiedCache, most_rows: int) -> dict[int, float]:
    """Seconds of a step by its rows, each with logits: of the powers of two up to ``most_rows``.

    All write to the cache's first block, which no sequence may hold or have published.
    """
    seconds: dict[int, float] = {}
    fastest = math.inf
    # The first pass of all brings the weights into memory. A size that is measured once must not.
    model.forward(_batch((1,), 1, cache), cache)
    # The largest first: what a busy machine has slowed down takes no longer than a larger step.
    for rows in reversed(list(sizes(max(2, most_rows)))):
        batch = _batch((1,) * rows, rows, cache)
        until_s = time.perf_counter() + MEASURED_S
        # The first pass of a size may compile or allocate.
        passes, took_s = 0, 0.0
        while took_s < SLOW_S and (passes < 2 or time.perf_counter() < until_s):
            begun_s = time.perf_counter()
            model.forward(batch, cache)[-1, -1].item()
            took_s = time.perf_counter() - begun_s
            fastest = min(fastest, took_s)
            passes += 1
        seconds[rows] = fastest
    return seconds


def run_first_requests(
    submit: Callable[[GenerationRequest], Generation],
    device: torch.device,
    max_context: int,
    max_sequences: int,
    max_step_tokens: int,
) -> None:
    """Runs :func:`first_requests`, one group after the other."""
    for requests in first_requests(device, max_context, max_sequences, max_step_tokens):
        for generation in [submit(request) for request in requests]:
            generation.result(TIMEOUT_S)


def first_requests(
    device: torch.device, max_context: int, max_sequences: int, max_step_tokens: int
) -> Iterator[list[GenerationRequest]]:
    """Requests to run before the first job, in groups that run together.

    The first pass allocates memory that later ones reuse. On a card the first prompt is as long as
    a step allows. Then the maximum number of sequences samples with truncation, which takes the
    most memory of all sampling except penalties and log probabilities, which few jobs request.
    Where the context is a single token, jobs can only have their prompt scored.
    """
    on_card = device.type == "cuda"
    tokens = min(FIRST_TOKENS, max_context - 1)
    longest = min(max_step_tokens, max_context - tokens)
    yield [
        GenerationRequest(
            prompt_token_ids=[0] * (longest if on_card else 1),
            max_tokens=tokens,
            prompt_logprobs=None if tokens else 0,
            temperature=0,
            ignore_eos=True,
        )
    ]
    if not on_card or not tokens:
        return
    whole, rest = divmod(max_sequences, MAX_CHOICES)
    yield [
        GenerationRequest(
            prompt_token_ids=[0],
            # Long enough that the last sequence starts before the first ends.
            max_tokens=min(FULL_WIDTH_TOKENS, max_context - 1),
            top_p=0.9,
            n=choices,
            ignore_eos=True,
        )
        for choices in [MAX_CHOICES] * whole + [rest] * bool(rest)
    ]


def sizes(most: int) -> Iterator[int]:
    """The powers of two below ``most``, and ``most``."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _prompts(tokens: int, max_context: int) -> tuple[int, ...]:
    """The lengths of the fewest prompts that hold this many tokens."""
    whole, rest = divmod(tokens, max_context)
    return (max_context,) * whole + (rest,) * bool(rest)


def _batch(
    lengths: tuple[int, ...], logits: int, cache: UnifiedCache, context: int = 0
) -> RaggedBatch:
    """Prompts' ends of these ``lengths``, whole unless they have at least ``context`` tokens, with
    logits of the last ``logits`` tokens."""
    device = cache.shape.device
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    contexts = tuple(max(length, context) for length in lengths)
    width = -(-max(contexts) // cache.block_size)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=device)
    slots = positions % cache.block_size
    return RaggedBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_lengths=lengths,
        context_lengths=contexts,
        places=(Places(tables, slots),) * len(cache.shape.groups),
        logits_rows=torch.arange(tokens - logits, tokens, device=device),
    )
