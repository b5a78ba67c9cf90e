"""The memory of one shared cache against that of many: ``python -m benches.cache_memory``.

The tensors are really allocated, except in the map of masks: only its largest mask is, and the
sizes of the others follow from it.
"""

from __future__ import annotations

import torch

from llorch_worker.cache import MAX_QUERY_TOKENS, CausalMasks, RopeTables
from llorch_worker.contract.quantities import human_bytes

CONTEXTS = (512, 2048, 4096)
LAYERS = 32
HEAD_DIM = 128
ROPE_THETA = 10000.0
CPU = torch.device("cpu")


def strip_bytes(context: int) -> int:
    """The one mask; every smaller or shifted mask is a view of it."""
    return CausalMasks(max_query=MAX_QUERY_TOKENS, max_context=context, device=CPU).nbytes


def map_bytes(context: int, dtype: torch.dtype) -> int:
    """A square mask for each length, after prompts of every length up to ``context``."""
    largest = torch.ones(context, context, dtype=dtype).tril_()
    assert largest.nbytes == context**2 * dtype.itemsize
    return sum(length**2 for length in range(1, context + 1)) * dtype.itemsize


def rope_bytes(context: int) -> int:
    return RopeTables(
        head_dim=HEAD_DIM, theta=ROPE_THETA, scaling=None, max_context=context, device=CPU
    ).nbytes


def main() -> None:
    """Print the table, one line per context."""
    rows: list[tuple[str, ...]] = [
        (
            "context",
            "one strip",
            "a square mask",
            "a mask per length, bool",
            "the same, float32",
            "RoPE tables",
            f"in each of {LAYERS} layers: strip and tables",
        )
    ]
    for context in CONTEXTS:
        strip, rope = strip_bytes(context), rope_bytes(context)
        sizes = (
            strip,
            context**2,
            map_bytes(context, torch.bool),
            map_bytes(context, torch.float32),
            rope,
            LAYERS * (strip + rope),
        )
        rows.append((f"{context:,}", *map(human_bytes, sizes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
