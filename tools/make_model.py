"""Writes a Llama with random weights as GGUF, of any size and block type, for benchmarks and tests.

    python tools/make_model.py --shape tinyllama-1.1b --type q4_0 --out tinyllama-q4_0.gguf
    python tools/make_model.py --weights llorch_worker/assets/demo.gguf --type f32 --out f32.gguf
    python tools/make_model.py --weights f32.gguf --out folder

``--weights`` writes another file's model again, in another type or as a Hugging Face folder.

A seed gives the same weights in every type that ``gguf`` can quantise to. The K and IQ types
consist of random blocks instead (see random_blocks.py). Norms are float32; all matrices have one
type unless --output-type is given. Weights are drawn and written one tensor at a time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import made_up_vocabulary
import numpy as np
import numpy.typing as npt
import random_blocks
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockType

LOGIT_SPREAD = 3.0
"""Standard deviation of the logits: some tokens are likely, none is certain."""


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; a head has ``hidden / heads`` dimensions."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    context_tokens: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": Shape(512, 256, 512, 2, 4, 2, 512),
    "tinyllama-1.1b": Shape(32000, 2048, 5632, 22, 32, 4, 2048),
    "long-context": Shape(512, 1024, 2816, 4, 8, 2, 33024),
    "llama-2-7b": Shape(32000, 4096, 11008, 32, 32, 32, 4096),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: ``shape`` is row-major, ``spread`` the standard deviation (0: ones)."""

    name: str
    shape: tuple[int, ...]
    spread: float
    kind: BlockType

    @property
    def stored_bytes(self) -> int:
        block_elements, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block_elements * block_bytes


class CannotWrite(Exception):
    """The type does not fit the shape or cannot be written; the message says why."""


def block_type(name: str) -> BlockType:
    """The type named ``q4_0`` etc.; raises CannotWrite if it cannot be written."""
    kind = BlockType.__members__.get(name.upper())
    if kind is None:
        raise CannotWrite(f"unknown block type {name}; allowed: {', '.join(writable_types())}")
    if not _writable(kind):
        raise CannotWrite(
            f"{name} cannot be written: gguf does not quantise to it, and random bytes are not "
            f"valid blocks of it; allowed: {', '.join(writable_types())}"
        )
    return kind


def writable_types() -> list[str]:
    """Names of all types that can be written."""
    return [kind.name.lower() for kind in BlockType if _writable(kind)]


def _writable(kind: BlockType) -> bool:
    return kind in random_blocks.BLOCK_TYPES or _quantises(kind)


def _quantises(kind: BlockType) -> bool:
    try:
        gguf.quantize(np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32), kind)
    except NotImplementedError:
        return False
    return True


def file_type(kind: BlockType) -> int | None:
    """GGUF's number for a file whose matrices are of ``kind``; None if it has none."""
    for name in (f"ALL_{kind.name}", f"MOSTLY_{kind.name}", f"MOSTLY_{kind.name}_S"):
        if name in gguf.LlamaFileType.__members__:
            return int(gguf.LlamaFileType[name])
    return None


def tensors(shape: Shape, kind: BlockType, output_kind: BlockType | None = None) -> list[Tensor]:
    """All tensors of the model in the file's order.

    Raises CannotWrite if a row of a matrix is not a whole number of blocks.
    """

    def matrix(name: str, rows: int, columns: int, gain: float, of: BlockType = kind) -> Tensor:
        block_elements = GGML_QUANT_SIZES[of][0]
        if columns % block_elements:
            raise CannotWrite(
                f"{of.name.lower()} has blocks of {block_elements} values, and the rows of {name} "
                f"have {columns}; choose another type or shape"
            )
        return Tensor(name, (rows, columns), gain / math.sqrt(columns), of)

    def norm(name: str) -> Tensor:
        return Tensor(name, (shape.hidden,), 0.0, BlockType.F32)

    kv_rows = shape.kv_heads * shape.head_dim
    # Additions to the residual stream shrink with depth, or it would grow with the layers.
    into_stream = 1 / math.sqrt(2 * shape.layers)
    table = [matrix("token_embd.weight", shape.vocab, shape.hidden, math.sqrt(shape.hidden))]
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        table += [
            norm(at + "attn_norm.weight"),
            matrix(at + "attn_q.weight", shape.hidden, shape.hidden, 1),
            matrix(at + "attn_k.weight", kv_rows, shape.hidden, 1),
            matrix(at + "attn_v.weight", kv_rows, shape.hidden, 1),
            matrix(at + "attn_output.weight", shape.hidden, shape.hidden, into_stream),
            norm(at + "ffn_norm.weight"),
            matrix(at + "ffn_gate.weight", shape.intermediate, shape.hidden, 1),
            matrix(at + "ffn_up.weight", shape.intermediate, shape.hidden, 1),
            matrix(at + "ffn_down.weight", shape.hidden, shape.intermediate, into_stream),
        ]
    table += [
        norm("output_norm.weight"),
        matrix("output.weight", shape.vocab, shape.hidden, LOGIT_SPREAD, output_kind or kind),
    ]
    return table


def write_model(
    path: Path,
    shape: Shape,
    table: list[Tensor],
    *,
    seed: int = 0,
    weights: Path | None = None,
    vocabulary: Path | None = None,
) -> Iterator[Tensor]:
    """Write the model; yield each tensor once it is in the file.

    Args:
        weights: a GGUF file of ``shape`` with the values; None draws them.
        vocabulary: a GGUF file whose tokenizer is copied; None generates one.

    Raises:
        CannotWrite: ``weights`` or ``vocabulary`` cannot be read or is not of ``shape``, or
            ``gguf`` does not quantise to the type.
    """
    values = None if weights is None else _values(weights)
    # Under another name until it is complete.
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    add_shape(writer, "random weights" if weights is None else weights.stem, shape)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    # OpenVINO refuses a file that does not say it.
    if (kind := file_type(table[0].kind)) is not None:
        writer.add_file_type(kind)
    if vocabulary is None:
        made_up = made_up_vocabulary.made_up_vocabulary(shape.vocab, seed)
        add_vocabulary(writer, made_up.pieces, made_up.scores, made_up.types)
    else:
        _copy_vocabulary(writer, vocabulary, shape.vocab)
    for tensor in table:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.stored_bytes, tensor.kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, tensor in enumerate(table):
            if values is not None:
                data = _quantised(tensor, values(tensor))
            else:
                data = _data(tensor, np.random.default_rng([seed, number]))
            writer.write_tensor_data(data)
            yield tensor
        writer.close()
        partial.rename(path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _data(tensor: Tensor, random: np.random.Generator) -> npt.NDArray[Any]:
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    rows, columns = tensor.shape
    if tensor.kind in random_blocks.BLOCK_TYPES:
        return random_blocks.random_blocks(tensor.kind).rows(random, (rows, columns), tensor.spread)
    values = random.standard_normal((rows, columns), dtype=np.float32)
    values *= tensor.spread
    return _quantised(tensor, values)


def _quantised(tensor: Tensor, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    try:
        return gguf.quantize(values, tensor.kind)
    except NotImplementedError as error:
        kind = tensor.kind.name.lower()
        raise CannotWrite(f"{tensor.name}: gguf does not quantise weights to {kind}") from error


def shape_of(path: Path) -> Shape:
    """The sizes of the Llama in a GGUF file."""
    fields = _read(path).fields

    def number(key: str) -> Any:
        if f"llama.{key}" not in fields:
            raise CannotWrite(f"{path} does not say llama.{key}")
        return fields[f"llama.{key}"].contents()

    return Shape(
        vocab=number("vocab_size"),
        hidden=number("embedding_length"),
        intermediate=number("feed_forward_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        context_tokens=number("context_length"),
        rope_theta=number("rope.freq_base"),
        rms_eps=number("attention.layer_norm_rms_epsilon"),
    )


def _values(path: Path) -> Callable[[Tensor], npt.NDArray[np.float32]]:
    """Dequantises tensors of the file."""
    stored = {tensor.name: tensor for tensor in _read(path).tensors}

    def values(tensor: Tensor) -> npt.NDArray[np.float32]:
        if tensor.name not in stored:
            raise CannotWrite(f"{path} has no {tensor.name}")
        source = stored[tensor.name]
        return gguf.dequantize(source.data, source.tensor_type).reshape(tensor.shape)

    return values


def _read(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise CannotWrite(f"{path} cannot be read as GGUF: {error}") from error


def add_shape(writer: gguf.GGUFWriter, name: str, shape: Shape) -> None:
    """Write the metadata of a model of ``shape``."""
    writer.add_name(name)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_vocab_size(shape.vocab)


def add_vocabulary(
    writer: gguf.GGUFWriter, pieces: list[str], scores: list[float], types: list[int]
) -> None:
    """Write a vocabulary in Llama's layout: <unk>, <s>, </s> and 256 bytes come first."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.encode() for piece in pieces])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(made_up_vocabulary.BOS_ID)
    writer.add_eos_token_id(made_up_vocabulary.EOS_ID)
    writer.add_unk_token_id(made_up_vocabulary.UNK_ID)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


def _copy_vocabulary(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    fields = _read(source).fields
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != size:
        found = "no" if tokens is None else f"{len(tokens.data):,}"
        raise CannotWrite(f"{source} has {found} tokens but the shape has {size:,}")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            item = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], item)


def main() -> int:
    options = _options()
    began_s = time.perf_counter()
    weights: Path | None = options.weights
    try:
        if weights is not None and options.out.suffix != ".gguf":
            from hugging_face import write_folder  # imports transformers

            write_folder(weights, options.out)
            print(f"{options.out}: {weights} as a Hugging Face folder in float32")
            return 0
        shape = SHAPES[options.shape] if weights is None else shape_of(weights)
        output_kind = block_type(options.output_type) if options.output_type else None
        table = tensors(shape, block_type(options.type), output_kind)
        total_bytes = sum(tensor.stored_bytes for tensor in table)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        written_bytes = 0
        for tensor in write_model(
            options.out, shape, table, seed=options.seed, weights=weights,
            vocabulary=options.vocabulary or weights,
        ):  # fmt: skip
            written_bytes += tensor.stored_bytes
            if sys.stderr.isatty():
                share = written_bytes / total_bytes
                print(f"\r{share:4.0%}  {tensor.name:<32}", end="", file=sys.stderr, flush=True)
    except (CannotWrite, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if sys.stderr.isatty():
        print("\r" + " " * 40, end="\r", file=sys.stderr)
    parameters = sum(math.prod(tensor.shape) for tensor in table)
    size_bytes = options.out.stat().st_size
    print(
        f"{options.out}: {parameters:,} parameters in {options.type}, {size_bytes:,} bytes, "
        f"{time.perf_counter() - began_s:.1f} s"
    )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"types: {', '.join(writable_types())}"
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="tinyllama-1.1b")
    add("--type", default="q4_0", help="block type of the matrices (q4_0)")
    add("--output-type", help="block type of the output matrix (q6_k in many published q4 files)")
    add("--weights", type=Path, help="GGUF file whose model to write (default: random weights)")
    add("--out", type=Path, required=True, help="a GGUF file; with --weights also a folder")
    add("--seed", type=int, default=0)
    add(
        "--vocabulary",
        type=Path,
        help="GGUF file whose tokenizer to copy (default: made up)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
