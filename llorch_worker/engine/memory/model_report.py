"""What a model file is and what it will cost in memory, from its metadata alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings, default_model_name

if TYPE_CHECKING:
    from llorch_worker.model import LlamaConfig
    from llorch_worker.weights import Checkpoint, Linears


class TensorType(BaseModel):
    """How many tensors of one stored type there are, and their bytes in the file."""

    model_config = ConfigDict(frozen=True)

    name: str
    tensors: int
    stored_bytes: int


class KeptType(BaseModel):
    """A type of block that weights stay in. Their codes are the file's, laid out anew."""

    model_config = ConfigDict(frozen=True)

    name: str
    stored_bits: float
    kept_bits: float
    """Of a weight, with its share of scales and offsets: in the file, and in memory."""

    def __str__(self) -> str:
        """``Q8_0``, or ``Q6_K in 9 bits`` where it takes other room than in the file."""
        alike = self.kept_bits == self.stored_bits
        return self.name if alike else f"{self.name} in {self.kept_bits:g} bits"


class MemoryReport(BaseModel):
    """Bytes that a worker takes for this model, by part, against what is free on its device."""

    model_config = ConfigDict(frozen=True)

    device: str
    dtype: str
    """What is computed in."""
    quantised_types: tuple[KeptType, ...]
    """Types of block that weights are kept in; the others are in ``dtype``."""
    kernels: str
    """What computes between the matrices: ``torch``, ``native`` or ``triton``."""
    kernels_reason: str
    max_sequences: int
    max_context_tokens: int
    full_contexts: float
    """How many contexts of ``max_context_tokens`` the KV blocks hold at once. Where they do not
    fit, the blocks are those that ``kv_cache_bytes`` asks for, or else of one context."""
    weights_bytes: int
    kv_bytes: int
    """With their scales, where they are quantised."""
    rope_bytes: int
    masks_bytes: int
    decode_bytes: int
    """Buffers of recorded decode steps."""
    workspace_bytes: int
    process_bytes: int
    """Of Python and its libraries, as they are in this process; 0 on a card, which holds none."""
    total_bytes: int
    free_bytes: int
    cache_share: float
    """Of what weights leave free, the most that cache and workspace may take: the rest is for other
    processes, or the allocator's fragments."""
    fits: bool
    misfit: str | None
    """Why it does not fit, in the worker's words."""

    @property
    def kept_as(self) -> str:
        """What weights are kept as: ``Q4_0 and Q6_K in 9 bits, the rest in bfloat16``."""
        if not self.quantised_types:
            return self.dtype
        return f"{' and '.join(map(str, self.quantised_types))}, the rest in {self.dtype}"


class ModelReport(BaseModel):
    """Everything that ``llorch inspect`` tells."""

    model_config = ConfigDict(frozen=True)

    path: Path
    name: str
    layout: str
    file_bytes: int
    architecture: str
    title: str | None
    parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    vocab_size: int
    rope_theta: float
    rope_scaling: str | None
    tied_embeddings: bool
    tensor_types: tuple[TensorType, ...]
    memory: MemoryReport


def report(settings: Settings) -> ModelReport:
    """Look at the model of ``settings``; reads headers and loads no weights.

    Raises:
        ModelLoadFailed: for what is missing, damaged or no Llama, for a tokenizer that a worker
            could not use, and for a device or dtype that is not there.
    """
    from llorch_worker.model import resolve_config
    from llorch_worker.text.loading import load_tokenizer
    from llorch_worker.weights import open_checkpoint

    checkpoint = open_checkpoint(settings.model)
    config = resolve_config(checkpoint)
    load_tokenizer(checkpoint)
    tensors = checkpoint.tensors.values()
    counts = Counter(tensor.dtype_name for tensor in tensors)
    stored = {
        name: sum(tensor.stored_bytes for tensor in tensors if tensor.dtype_name == name)
        for name in counts
    }
    scaling = config.rope_scaling
    return ModelReport(
        path=settings.model,
        name=settings.model_name or default_model_name(settings.model),
        layout=checkpoint.layout,
        file_bytes=sum(file.stat().st_size for file in checkpoint.files),
        architecture=_architecture(checkpoint.metadata),
        title=checkpoint.metadata.get("general.name"),
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context_tokens=config.max_context,
        vocab_size=config.vocab_size,
        rope_theta=config.rope_theta,
        rope_scaling=f"{scaling.kind} x{scaling.factor:g}" if scaling else None,
        tied_embeddings=config.tie_word_embeddings,
        tensor_types=tuple(
            TensorType(name=name, tensors=count, stored_bytes=stored[name])
            for name, count in counts.most_common()
        ),
        memory=_memory(settings, config, checkpoint),
    )


def _memory(settings: Settings, config: LlamaConfig, checkpoint: Checkpoint) -> MemoryReport:
    import psutil

    from llorch_worker.cache import UnifiedCache
    from llorch_worker.engine.device.graphs import records_decode
    from llorch_worker.engine.memory import block_plan
    from llorch_worker.engine.memory.free_memory import free_bytes
    from llorch_worker.engine.memory.placement import resolve_device, resolve_dtype
    from llorch_worker.engine.memory.workspace import workspace_bytes
    from llorch_worker.kernels import choose_ops
    from llorch_worker.model import model_bytes, parameter_count
    from llorch_worker.weights import select_linears

    device = resolve_device(settings.device)
    dtype = resolve_dtype(
        settings.dtype, device, parameters=parameter_count(config), kernels=settings.kernels
    )
    max_context = settings.max_context or config.max_context
    if max_context > config.max_context:
        raise usage_error(
            f"max_context must be at most {config.max_context}, the model's own context "
            f"(got {max_context})"
        )

    kv_dtype = settings.kv_dtype
    chosen = choose_ops(
        device, dtype, settings.kernels, head_dim=config.head_dim, kv_dtype=kv_dtype
    )
    recorded = settings.cuda_graphs and records_decode(device, chosen.ops)
    decode_rows = settings.max_sequences if recorded else 0
    shape = block_plan.cache_shape(
        config,
        max_context,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        decode_rows=decode_rows,
    )
    workspace = workspace_bytes(
        config,
        max_context=max_context,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        decode_rows=decode_rows,
        dtype=dtype,
        device=device,
    )

    def cache_bytes(num_blocks: int) -> Mapping[str, int]:
        cache = UnifiedCache.required_bytes(shape, num_blocks)
        return cache | {"workspace": workspace}

    linears = select_linears(device, dtype, settings.kernels)
    weights = model_bytes(config, checkpoint, linears, dtype)
    share = block_plan.CUDA_SHARE if device.type == "cuda" else block_plan.CPU_SHARE
    free = free_bytes(device)
    one_context = -(-max_context // shape.block_size)
    misfit = None
    try:
        block_plan.require_room(weights, device)
        # The worker plans once the weights are in; they are not, so they are taken off here.
        blocks = block_plan.plan_blocks(
            cache_bytes,
            block_size=shape.block_size,
            max_context=max_context,
            max_sequences=settings.max_sequences,
            available_bytes=int((free - weights) * share),
            kv_cache_bytes=settings.kv_cache_bytes,
        )
    except ModelLoadFailed as error:
        misfit = error.message
        asked_bytes = settings.kv_cache_bytes
        block_bytes = sum(cache_bytes(1).values()) - sum(cache_bytes(0).values())
        blocks = one_context if asked_bytes is None else asked_bytes // block_bytes
    parts = cache_bytes(blocks)
    process = psutil.Process().memory_info().rss if device.type == "cpu" else 0
    return MemoryReport(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        quantised_types=tuple(_kept_types(config, checkpoint, linears)),
        kernels=chosen.ops.name,
        kernels_reason=chosen.reason,
        max_sequences=settings.max_sequences,
        max_context_tokens=max_context,
        full_contexts=round(blocks / one_context, 2),
        weights_bytes=weights,
        kv_bytes=parts["kv"] + parts.get("kv_scales", 0),
        rope_bytes=parts["rope"],
        masks_bytes=parts["masks"],
        decode_bytes=parts.get("decode", 0),
        workspace_bytes=workspace,
        process_bytes=process,
        total_bytes=weights + sum(parts.values()) + process,
        free_bytes=free,
        cache_share=share,
        fits=misfit is None,
        misfit=misfit,
    )


def _kept_types(
    config: LlamaConfig, checkpoint: Checkpoint, linears: Linears
) -> Iterator[KeptType]:
    """Those of most numbers first."""
    from llorch_worker.model import quantised_types
    from llorch_worker.weights import FusedWeight, Part

    for name in quantised_types(config, checkpoint, linears):
        # Each takes as much as any other; that of most rows loses least to rounding them up.
        of_type = (
            FusedWeight((Part(tensor, info.shape),))
            for tensor, info in checkpoint.tensors.items()
            if info.dtype_name == name
        )
        kept = (each for each in of_type if linears.quantised_parts(checkpoint, each))
        largest = max(kept, key=lambda each: each.elements)
        stored_bytes = checkpoint.tensors[largest.parts[0].name].stored_bytes
        yield KeptType(
            name=name,
            stored_bits=round(8 * stored_bytes / largest.elements, 2),
            kept_bits=round(8 * linears.weight_bytes(checkpoint, largest) / largest.elements, 2),
        )


def _architecture(metadata: Mapping[str, Any]) -> str:
    names = metadata.get("architectures") or [metadata.get("general.architecture", "llama")]
    return str(names[0])
