"""The cost of a hit in the prefix cache, as a share of the prefill that it saves.

    python -m benches.prefix_hit MODEL [--prefix-tokens 400] [--rest-tokens 16] [--threads 2]

MODEL is a .gguf file or a Hugging Face folder. In each round a new random prefix is prefilled with
a rest (a miss), then found by a prompt of the same prefix and another rest (a hit). The time to the
first token of both is measured on an idle engine; their difference is the saving. The cost is the
scheduler's work of one round, minus that of a prompt as long as the rest: finding and publishing
the prefix's blocks, holding and releasing them. Bound: at most 2%.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from statistics import median

import torch

from benches.arguments import existing_path, known_errors
from llorch_worker.cache import BLOCK_SIZE_TOKENS, BlockPool
from llorch_worker.contract import Event, GenerationRequest, Tokens
from llorch_worker.engine import Engine
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence

BOOKKEEPING_ROUNDS = 300
KEPT_PREFIXES = 20
"""Other prefixes in the pool besides the one to find."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost and the saving of a prefix hit.")
    parser.add_argument("model", type=existing_path)
    parser.add_argument("--prefix-tokens", type=int, default=400)
    parser.add_argument("--rest-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    prefix, rest = options.prefix_tokens, options.rest_tokens
    with Engine.load(
        options.model,
        options.device,
        options.dtype,
        max_sequences=1,
        max_context=prefix + rest + BLOCK_SIZE_TOKENS,
        max_step_tokens=prefix + rest,
        num_threads=options.threads,
    ) as engine:
        stats = engine.stats()
        misses, hits = [], []
        for number in range(options.rounds + 1):
            common = _ids(chance, prefix, engine)
            miss = _first_token_s(engine, common + _ids(chance, rest, engine), found=0)
            found = prefix // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
            hit = _first_token_s(engine, common + _ids(chance, rest, engine), found=found)
            if number:  # the first round warms up
                misses.append(miss)
                hits.append(hit)
        cost_s = _bookkeeping_s(engine, chance, prefix, rest)
    saved_s = median(late - early for late, early in zip(misses, hits, strict=True))
    print(f"command: {shlex.join(sys.orig_argv)}")
    print(
        f"{stats.model}: {stats.dtype} on {stats.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, seed {options.seed}"
    )
    print(f"prompts of {prefix} + {rest} tokens, medians of {options.rounds} rounds")
    print(f"first token, prefix computed: {1e3 * median(misses):.3f} ms")
    print(f"first token, prefix found:    {1e3 * median(hits):.3f} ms")
    print(f"saved:                        {1e3 * saved_s:.3f} ms")
    print(f"cost of a miss and a hit:     {1e3 * cost_s:.3f} ms of bookkeeping")
    print(f"cost / saved:                 {cost_s / saved_s:.2%}")


def _ids(chance: random.Random, count: int, engine: Engine) -> list[int]:
    return [chance.randrange(engine.config.vocab_size) for _ in range(count)]


def _first_token_s(engine: Engine, ids: list[int], *, found: int) -> float:
    """Seconds from submission to the first token; raises unless ``found`` tokens were found."""
    arrived_s: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, Tokens):
            arrived_s.append(time.perf_counter())

    request = GenerationRequest(prompt_token_ids=ids, max_tokens=1, temperature=0, ignore_eos=True)
    began_s = time.perf_counter()
    result = engine.submit(request, on_event=note).result()
    if result.usage.cached != found:
        raise RuntimeError(f"found {result.usage.cached} cached tokens instead of {found}")
    return arrived_s[0] - began_s


def _bookkeeping_s(engine: Engine, chance: random.Random, prefix: int, rest: int) -> float:
    """The scheduler's time for a miss and a hit, minus that for two prompts of the rest alone."""
    blocks = -(-(prefix + rest) // BLOCK_SIZE_TOKENS)
    scheduler = Scheduler(
        BlockPool(KEPT_PREFIXES * blocks),
        block_size=BLOCK_SIZE_TOKENS,
        max_sequences=1,
        max_step_tokens=prefix + rest,
    )

    def scheduled_s(ids: list[int]) -> float:
        request = GenerationRequest(prompt_token_ids=ids, max_tokens=1)
        sequence = Sequence(ids, request, seed=0, text=ChoiceText(engine.tokenizer))
        began_s = time.perf_counter()
        scheduler.add(sequence)
        scheduler.advance(scheduler.schedule())
        scheduler.finish(sequence)
        return time.perf_counter() - began_s

    costs = []
    for _ in range(BOOKKEEPING_ROUNDS):
        common = _ids(chance, prefix, engine)
        with_prefix = sum(scheduled_s(common + _ids(chance, rest, engine)) for _ in range(2))
        without = sum(scheduled_s(_ids(chance, rest, engine)) for _ in range(2))
        costs.append(with_prefix - without)
    return median(costs)


if __name__ == "__main__":
    with known_errors():
        main()
