"""Two variants of the native kernels by turns: a prefill and decode steps of both engines.

``python -m benches.native_variants MODEL.gguf avx512bf16 amx``. It measures the processor time of
one thread, which depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

from benches.arguments import existing_path, known_errors
from benches.processor_time import processor_s
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.engine import Engine
from llorch_worker.kernels.native.variants import VARIANTS
from llorch_worker.settings import Variant

PROMPT_TOKENS = 512
PASSES = 3
STEPS = 12
SEQUENCES = (1, 8, 16, 32)


def seconds(engine: Engine, sequences: int, prompt_tokens: int, new_tokens: int) -> float:
    random = Random(0)
    prompts = (
        [random.randrange(5, 30_000) for _ in range(prompt_tokens)] for _ in range(sequences)
    )
    return processor_s(engine, prompts, new_tokens)


def step_seconds(sequences: int, engine: Engine) -> float:
    whole = seconds(engine, sequences, 8, 1 + STEPS)
    return (whole - seconds(engine, sequences, 8, 1)) / STEPS


def compare(
    what: str, tokens: int, measured: Callable[[Engine], float], engines: list[Engine]
) -> None:
    """Print the tokens a second of both, medians, and the ratio of the second to the first."""
    one, other = engines
    pairs = alternate(lambda _: measured(one), lambda _: measured(other), range(PASSES))
    first, second = (tokens / statistics.median(each) for each in zip(*pairs, strict=True))
    print(f"{what}: {first:.1f} and {second:.1f} tokens/s: {second / first:.2f}", flush=True)


def main(path: Path, *variants: Variant) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine.load(
                    path,
                    "cpu",
                    "bfloat16",
                    num_threads=1,
                    max_sequences=max(SEQUENCES),
                    max_context=640,
                    prefix_caching=False,
                    kernels=variant,
                )
            )
            for variant in variants
        ]
        for engine in engines:
            seconds(engine, 1, 16, 2)
        prefill = f"prefill {PROMPT_TOKENS}"
        compare(
            prefill, PROMPT_TOKENS, lambda engine: seconds(engine, 1, PROMPT_TOKENS, 1), engines
        )
        for count in SEQUENCES:
            compare(f"decode x{count}", count, partial(step_seconds, count), engines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benches.native_variants")
    parser.add_argument("model", type=existing_path)
    parser.add_argument("variants", nargs=2, choices=VARIANTS)
    given = parser.parse_args()
    with known_errors():
        main(given.model, *given.variants)
