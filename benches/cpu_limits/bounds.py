"""How fast a model's steps can be at most, if only its matrix products took time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benches.cpu_limits.figures import Bound, ModelBounds, Product, ProductRate, Rate
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.kernels.native.library import NativeUnavailable, native_kernels
from llorch_worker.model import resolve_config
from llorch_worker.model.weight_table import global_weights, layer_weights
from llorch_worker.settings import Variant
from llorch_worker.weights import Checkpoint, FusedWeight, open_checkpoint
from llorch_worker.weights.native_linear import NativeLinears

PREFILL_TOKENS = 512
SEQUENCES = (1, 8, 16, 32)
PRODUCTS_OF_BITS: dict[int, Product] = {4: "scaled_nibbles", 8: "scaled_bytes"}
"""Of codes."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model, and the multiply-adds of a token by how they are kept."""

    model: Path
    layers: Counter[Product]
    """Of one token in all layers."""
    output: Counter[Product]
    """Of one token whose logits are needed."""
    weight_bytes: int

    @classmethod
    def of(cls, model: Path) -> Self:
        """Those of a file as the native kernels keep them. Reads its metadata and no weights.

        Raises:
            ModelLoadFailed: the file is missing, damaged or not a Llama.
            CommandError: the native kernels cannot be used here.
        """
        checkpoint = open_checkpoint(model)
        config = resolve_config(checkpoint)
        embedding, _, *untied = global_weights(config)
        output = untied or [embedding]
        layers = [
            matrix
            for number in range(config.num_layers)
            for matrix in layer_weights(config, number).matrices
        ]
        try:
            linears = NativeLinears(native_kernels())
        except NativeUnavailable as reason:
            raise CommandError("NOT_MEASURED", f"there are no bounds: {reason}") from None
        return cls(
            model=model,
            layers=_multiply_adds(checkpoint, layers),
            output=_multiply_adds(checkpoint, output),
            weight_bytes=sum(linears.weight_bytes(checkpoint, each) for each in [*layers, *output]),
        )

    def bounds(self, products: Iterable[ProductRate], read_bytes: Rate) -> ModelBounds:
        """Those of each variant that ``products`` names. Each step reads all matrices once while it
        computes."""
        memory_s = self.weight_bytes / read_bytes.per_s
        rates = defaultdict[Variant, dict[Product, float]](dict)
        for each in products:
            rates[each.variant][each.product] = each.rate.per_s

        def bound(variant: Variant, step: str, tokens: int, logits: int) -> Bound:
            arithmetic_s = sum(
                (tokens * self.layers[product] + logits * self.output[product]) / per_s
                for product, per_s in rates[variant].items()
            )
            return Bound(
                variant=variant,
                step=step,
                tokens_per_s=tokens / max(arithmetic_s, memory_s),
                limit="arithmetic" if arithmetic_s > memory_s else "memory",
            )

        return ModelBounds(
            model=self.model,
            layer_multiply_adds=self.layers.total(),
            output_multiply_adds=self.output.total(),
            weight_bytes=self.weight_bytes,
            bounds=tuple(bound(variant, *step) for variant in rates for step in _steps()),
        )


def _steps() -> Iterator[tuple[str, int, int]]:
    """The title of each step, its tokens, and how many of them need logits."""
    yield f"prefill {PREFILL_TOKENS}", PREFILL_TOKENS, 1
    for sequences in SEQUENCES:
        yield f"decode x{sequences}", sequences, sequences


def _multiply_adds(checkpoint: Checkpoint, weights: Iterable[FusedWeight]) -> Counter[Product]:
    """One for each number of a matrix."""
    counts = Counter[Product]()
    for weight in weights:
        for form, piece in weight.pieces(checkpoint):
            counts["bf16" if form is None else PRODUCTS_OF_BITS[form.bits]] += piece.elements
    return counts
