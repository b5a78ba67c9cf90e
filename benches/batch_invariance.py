"""What batch invariance costs: processor time of a prefill and of decode steps, with and without.

``python -m benches.batch_invariance MODEL [DTYPE]``. It is the processor time of one thread, which
depends little on what else the machine does.
"""

from __future__ import annotations

import sys

from benches.processor_time import processor_s
from llorch_worker.engine import Engine

PROMPT_TOKENS = 128
STEPS = 8
CACHE_BYTES = 600_000_000


def processor_ms(engine: Engine, sequences: int, prompt_tokens: int, new_tokens: int) -> float:
    prompts = ([5 + number] * prompt_tokens for number in range(sequences))
    return 1e3 * processor_s(engine, prompts, new_tokens)


def measure(path: str, dtype: str, *, batch_invariant: bool) -> str:
    """The best of two passes."""
    with Engine.load(
        path,
        "cpu",
        dtype,
        num_threads=1,
        prefix_caching=False,
        kv_cache_bytes=CACHE_BYTES,
        batch_invariant=batch_invariant,
    ) as engine:
        processor_ms(engine, 1, 4, 2)
        prefill = min(processor_ms(engine, 1, PROMPT_TOKENS, 1) for _ in range(2))
        parts = [f"prefill of {PROMPT_TOKENS}: {prefill:.1f} ms"]
        for sequences in (1, 16):
            first = min(processor_ms(engine, sequences, 8, 1) for _ in range(2))
            whole = min(processor_ms(engine, sequences, 8, 1 + STEPS) for _ in range(2))
            parts.append(f"decode step of {sequences}: {(whole - first) / STEPS:.2f} ms")
    return ", ".join(parts)


if __name__ == "__main__":
    model, *dtypes = sys.argv[1:]
    for chosen in (False, True):
        print(
            f"invariant {chosen}:", measure(model, *(dtypes or ["float32"]), batch_invariant=chosen)
        )
