"""The document and the tables of ``python -m benches.cpu_limits``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import RenderableType

from llorch_worker.bench.instruments.provenance import Figures, Frozen
from llorch_worker.bench.tables import remark, table, title
from llorch_worker.settings import Variant

Product = Literal["float32", "bf16", "nibbles", "bytes", "scaled_nibbles", "scaled_bytes"]
"""What is multiplied: float32, bfloat16, or activations of 8 bits with codes of 4 and of 8 bits.
Scaled: with both scales of every 32 columns, as the kernels need them."""

MEMORY_MARK = "*"


class Rate(Frozen):
    """The rate of all threads together."""

    per_s: float
    """Of the best pass: disturbances do not count."""
    spread: float | None
    """Of the best tenth of the passes, at least three: largest minus smallest, as a share of the
    median. A large one says that the machine was too busy. None for one pass."""


class ProductRate(Frozen):
    """Multiply-adds in registers; one counts as two FLOP."""

    variant: Variant
    product: Product
    instruction: str
    rate: Rate


class Bound(Frozen):
    """The most tokens per second of a step, if only its matrix products took time."""

    variant: Variant
    step: str
    tokens_per_s: float
    limit: Literal["arithmetic", "memory"]


class ModelBounds(Frozen):
    """The bounds of one model, and what they follow from."""

    model: Path
    layer_multiply_adds: int
    """Of one token in all layers."""
    output_multiply_adds: int
    """Of one token whose logits are needed: all in a decode, the last of a prompt."""
    weight_bytes: int
    """Of all matrices, as the native kernels keep them."""
    bounds: tuple[Bound, ...]


class CpuLimits(Figures):
    """The document of ``python -m benches.cpu_limits --json``."""

    passes: int
    products: tuple[ProductRate, ...]
    read_bytes: Rate
    not_measured: tuple[Variant, ...]
    models: tuple[ModelBounds, ...]

    def parts(self) -> Iterator[RenderableType]:
        passes = "one pass" if self.passes == 1 else f"best of {self.passes} passes"
        yield title(f"Multiply-adds in registers, all threads, {passes}")
        if self.passes > 1:
            yield "In brackets: the spread of the best tenth, large on a machine that is too busy"
        rows = [
            (each.variant, each.product, each.instruction, _billions(each.rate, " G"))
            for each in self.products
        ]
        titles = ("variant", "product", "instruction", "per second")
        yield table([(each, "") for each in titles], rows, words=3)
        yield f"\nMemory, read in order: {_billions(self.read_bytes, ' GB')}"
        for variant in self.not_measured:
            yield remark(f"{variant}: not measured")
        for model in self.models:
            yield from _bounds_of(model)


def _bounds_of(model: ModelBounds) -> Iterator[RenderableType]:
    yield ""
    yield title(f"{model.model.name}: tokens/s at most")
    yield (
        f"  {model.layer_multiply_adds / 1e6:,.1f} M multiply-adds a token, "
        f"{model.output_multiply_adds / 1e6:,.1f} M for its logits; "
        f"weights of {model.weight_bytes / 1e9:.2f} GB"
    )
    steps = list(dict.fromkeys(bound.step for bound in model.bounds))
    cells = {(bound.variant, bound.step): _tokens(bound) for bound in model.bounds}
    rows = [
        (variant, *(cells[variant, step] for step in steps))
        for variant in dict.fromkeys(bound.variant for bound in model.bounds)
    ]
    yield table([(each, "") for each in ("variant", *steps)], rows)
    if any(bound.limit == "memory" for bound in model.bounds):
        yield f"{MEMORY_MARK} limited by memory; the others by arithmetic"


def _billions(rate: Rate, unit: str) -> str:
    spread = "" if rate.spread is None else f" ({rate.spread:.0%})"
    return f"{rate.per_s / 1e9:,.1f}{unit}{spread}"


def _tokens(bound: Bound) -> str:
    # A place for the mark on every line keeps the figures in their column.
    return f"{bound.tokens_per_s:,.1f}{MEMORY_MARK if bound.limit == 'memory' else ' '}"
