"""How fast a model's steps can be at most, if only its matrix products took time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

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


def model_bounds(path: Path, products: Iterable[ProductRate], read_bytes: Rate) -> ModelBounds:
    """The bounds of each variant that ``products`` names, for a model in bfloat16.

    Each step reads all matrices once while it computes. Reads the model's metadata and no weights.

    Raises:
        ModelLoadFailed: the file is missing, damaged or not a Llama.
        CommandError: the native kernels cannot be used here.
    """
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint)
    embedding, _, *untied = global_weights(config)
    output = untied or [embedding]
    layers = [
        matrix
        for number in range(config.num_layers)
        for matrix in layer_weights(config, number).matrices
    ]
    of_layers, of_output = _multiply_adds(checkpoint, layers), _multiply_adds(checkpoint, output)
    weight_bytes = _weight_bytes(checkpoint, [*layers, *output])
    memory_s = weight_bytes / read_bytes.per_s
    rates = defaultdict[Variant, dict[Product, float]](dict)
    for each in products:
        rates[each.variant][each.product] = each.rate.per_s

    def bounds() -> Iterator[Bound]:
        for variant, per_s in rates.items():
            for step, tokens, logits in _steps():
                arithmetic_s = sum(
                    (tokens * of_layers[product] + logits * of_output[product]) / rate
                    for product, rate in per_s.items()
                )
                yield Bound(
                    variant=variant,
                    step=step,
                    tokens_per_s=tokens / max(arithmetic_s, memory_s),
                    limit="arithmetic" if arithmetic_s > memory_s else "memory",
                )

    return ModelBounds(
        model=path,
        layer_multiply_adds=of_layers.total(),
        output_multiply_adds=of_output.total(),
        weight_bytes=weight_bytes,
        bounds=tuple(bounds()),
    )


def _steps() -> Iterator[tuple[str, int, int]]:
    """The title of each step, its tokens, and how many of them need logits."""
    yield f"prefill {PREFILL_TOKENS}", PREFILL_TOKENS, 1
    for sequences in SEQUENCES:
        yield f"decode x{sequences}", sequences, sequences


def _multiply_adds(checkpoint: Checkpoint, weights: Iterable[FusedWeight]) -> Counter[Product]:
    """Those of one token: one for each number of a matrix, by how it is kept."""
    counts = Counter[Product]()
    for weight in weights:
        for form, piece in weight.pieces(checkpoint):
            product: Product = "bf16" if form is None else "nibbles" if form.bits == 4 else "bytes"
            counts[product] += piece.elements
    return counts


def _weight_bytes(checkpoint: Checkpoint, weights: Iterable[FusedWeight]) -> int:
    try:
        linears = NativeLinears(native_kernels())
    except NativeUnavailable as reason:
        raise CommandError("NOT_MEASURED", f"there are no bounds: {reason}") from None
    return sum(linears.weight_bytes(checkpoint, weight) for weight in weights)
