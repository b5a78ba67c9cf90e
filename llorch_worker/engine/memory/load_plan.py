"""The plan of a load: how the model is kept and its memory, decided before any weight is read."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import psutil
import torch

from llorch_worker.cache import MAX_QUERY_TOKENS, CacheShape, PagedKV, UnifiedCache
from llorch_worker.contract import TASK_NAME, TEXT_TASKS, ModelLoadFailed
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.contract.generation_config import GenerationConfig
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.engine.device.graphs import records_decode
from llorch_worker.engine.memory.compute_device import (
    check_kernels,
    free_bytes,
    resolve_device,
    resolve_dtype,
)
from llorch_worker.engine.memory.workspace import (
    DRAFT_ROWS,
    estimated_recorded_bytes,
    workspace_bytes,
)
from llorch_worker.engine_options import EngineOptions, KvDtype
from llorch_worker.intake.constraints.compiler import LARGE_VOCABULARY
from llorch_worker.kernels import ChosenOps, choose_ops
from llorch_worker.model import (
    ModelConfig,
    model_bytes,
    parameter_count,
    quantised_types,
    resolve_config,
)
from llorch_worker.model.native_layers import native_refusal
from llorch_worker.model_files.generation_config import read_generation_config
from llorch_worker.model_files.side_file import read_bytes
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.control_tokens import AroundTurns
from llorch_worker.text.loading import VocabularySource
from llorch_worker.weights import (
    Checkpoint,
    FusedWeight,
    Linears,
    Part,
    open_checkpoint,
    select_linears,
)

CACHE_SHARE: Final = {"cpu": 0.6, "cuda": 0.9}
"""The largest share of the memory left by weights and vocabulary that cache and workspace may take.
On the CPU the rest is for other processes, on a card for the allocator's fragmentation."""
SENTENCEPIECE_BYTES: Final = 220
"""A token of Gemma 3 (262,144 of them) takes 215."""
TOKENIZERS_BYTES: Final = 560
"""Qwen 2.5 (151,936 of them) took 836 and Gemma 3's tokenizer.json 817 while the library's model
was held twice, which takes 235 to 280."""
UNIGRAM_BYTES: Final = 1250
"""A token of XLM-RoBERTa (250,002 of them) takes 1,244: the library has a map for each byte."""
_UNIGRAM: Final = re.compile(rb'"vocab"\s*:\s*\[')
"""Only in a tokenizer.json of such a vocabulary; inside of a token its quotes are escaped."""
GRAMMAR_BYTES: Final = 210
"""What llguidance keeps of a token: 217 with Gemma 3, 194 with Qwen 2.5."""


@dataclass(frozen=True)
class KeptType:
    """A block type that weights keep. The codes are the file's, in another layout."""

    name: str
    stored_bits: float
    kept_bits: float
    """Bits per weight, including its share of scales and offsets, in the file and in memory."""

    def __str__(self) -> str:
        """``Q8_0``, or ``Q6_K in 9 bits`` if its size in memory differs from that in the file."""
        alike = self.kept_bits == self.stored_bits
        return self.name if alike else f"{self.name} in {self.kept_bits:g} bits"


LEAST_TOKENS: Final = 512
"""Of each sequence, on the average. A card with room for fewer takes fewer sequences by default."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The decisions of :func:`plan_load`. ``llorch inspect`` prints them; ``Engine.load`` follows
    them."""

    checkpoint: Checkpoint
    config: ModelConfig
    linears: Linears
    """How the matrices are kept."""
    kernels: ChosenOps
    """The operations for everything except matrix products, and why they were chosen."""
    shape: CacheShape
    options: EngineOptions
    weights_bytes: int
    workspace_bytes: int
    """The most memory that one step takes besides weights and cache."""
    recorded_bytes: int
    """What recorded decode steps take of that."""
    process_bytes: int
    """Memory of Python and its libraries before the load; 0 on a card."""
    vocabulary_bytes: int
    """Memory of the tokenizer, and of the grammars' vocabulary; 0 on a card."""
    free_bytes: int
    """Free on the device before the load."""
    num_blocks: int
    """The number of KV blocks. If the model does not fit, the number that ``kv_cache_bytes``
    requests, or else that one context needs."""
    misfit: str | None = None
    """The reason why the model does not fit, as a sentence."""

    def tokenizer(self, around: Callable[[], AroundTurns] | None = None) -> Tokenizer:
        """Reads the tokenizer. ``around``: says what the chat template writes around turns; None:
        it is rendered here. Raises ``ModelLoadFailed``."""
        if around is None:
            return load_tokenizer(self.checkpoint)
        return load_tokenizer(self.checkpoint, lambda _: around())

    @cached_property
    def generation_config(self) -> tuple[GenerationConfig, list[str]]:
        """How the model's makers sample from it, and a sentence for each value that is ignored."""
        return read_generation_config(self.checkpoint.metadata)

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.shape.dtype

    @property
    def dtype_name(self) -> str:
        """The compute dtype as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def arithmetic(self) -> str:
        """What besides the model decides the last bits of its logits."""
        kv = self.dtype_name if self.shape.kv_dtype == "auto" else self.shape.kv_dtype
        kernels = f"{self.linears.name} and {self.kernels.ops.name} kernels"
        return f"{self.device.type}, {self.dtype_name}, KV {kv}, {kernels}"

    @property
    def layers_refusal(self) -> str | None:
        """See ``native_refusal``."""
        return native_refusal(self.config, self.kernels.ops)

    @property
    def cache_share(self) -> float:
        """See ``CACHE_SHARE``."""
        return CACHE_SHARE[self.device.type]

    @property
    def longest_context(self) -> int:
        """The model's own, in tokens."""
        return self.config.max_context

    @property
    def full_contexts(self) -> float:
        """How many contexts of full length the KV blocks hold at once."""
        return round(self.num_blocks / self.shape.context_blocks, 2)

    @property
    def suits(self) -> bool:
        """Whether the model fits, and each sequence has blocks for a context of some length."""
        least = min(self.shape.max_context, LEAST_TOKENS)
        tokens = self.num_blocks * self.shape.block_size
        return self.misfit is None and tokens >= self.options.sequences * least

    @cached_property
    def cache_bytes(self) -> dict[str, int]:
        """Bytes of the cache by part; see ``UnifiedCache.required_bytes``."""
        return UnifiedCache.required_bytes(self.shape, self.num_blocks)

    @property
    def kept_types(self) -> tuple[KeptType, ...]:
        """Block types that weights keep, those with most weights first; the other weights are in
        ``dtype``."""
        names = quantised_types(self.config, self.checkpoint, self.linears)
        return tuple(map(self._kept_type, names))

    def _kept_type(self, name: str) -> KeptType:
        of_type = (
            FusedWeight((Part(tensor, info.shape),))
            for tensor, info in self.checkpoint.tensors.items()
            if info.dtype_name == name
        )
        kept = (each for each in of_type if each.quantised_parts(self.checkpoint))
        # Rows are rounded up to whole tiles, which matters least in the largest tensor.
        largest = max(kept, key=lambda each: each.elements)
        stored_bytes = self.checkpoint.tensors[largest.parts[0].name].stored_bytes
        kept_bytes = self.linears.weight_bytes(self.checkpoint, largest)
        return KeptType(
            name=name,
            stored_bits=round(8 * stored_bytes / largest.elements, 2),
            kept_bits=round(8 * kept_bytes / largest.elements, 2),
        )

    @property
    def kept_as(self) -> str:
        """The types in memory: ``Q4_0 and Q6_K in 9 bits, the rest in bfloat16``."""
        types = " and ".join(map(str, self.kept_types))
        return f"{types}, the rest in {self.dtype_name}" if types else self.dtype_name

    @property
    def total_bytes(self) -> int:
        """All bytes that the process will hold on the device."""
        cache = sum(self.cache_bytes.values())
        process = self.process_bytes + self.vocabulary_bytes + self.texts_bytes + self.cells_bytes
        return self.weights_bytes + cache + self.workspace_bytes + process

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those that the model does."""
        return (TASK_NAME,) if self.options.made_of is None else (TASK_NAME, *TEXT_TASKS)

    @property
    def cells_bytes(self) -> int:
        """Bytes of the cells of texts that are only read."""
        if self.options.made_of is None:
            return 0
        return self.options.cell_tokens * sum(PagedKV.slot_bytes(self.shape, 1).values())

    @property
    def texts_bytes(self) -> int:
        """Bytes of the recent texts that sequences draft from; 0 on a card."""
        keeps = self.options.drafter == "suffix" and self.device.type == "cpu"
        return self.options.suffix_bytes if keeps else 0

    def require_fit(self) -> LoadPlan:
        """This plan; raises ``ModelLoadFailed`` with the reason if the model does not fit."""
        if self.misfit is not None:
            raise ModelLoadFailed(self.misfit)
        return self

    def fitted_to(self, left_bytes: int) -> LoadPlan:
        """This plan with as many of its KV blocks as fit into the memory left by the weights and
        the vocabulary."""
        misfit = self._misfit(left_bytes)
        if misfit is None:
            fitting = self._blocks_in(self._room_bytes(left_bytes), self.num_blocks)
            return replace(self, num_blocks=fitting)
        asked_for = (
            self.shape.context_blocks if self.options.kv_cache_bytes is None else self.num_blocks
        )
        return replace(self, num_blocks=asked_for, misfit=misfit)

    def kv_bytes(self, num_blocks: int) -> int:
        """Bytes of so many KV blocks, scales included. Layers with a window have fewer of them."""
        counts = self.shape.block_counts(num_blocks)
        return sum(PagedKV.required_bytes(self.shape, counts).values())

    def with_recorded(self, recorded_bytes: int) -> LoadPlan:
        """This plan with what recorded steps were measured to take."""
        workspace = self.workspace_bytes - self.recorded_bytes + recorded_bytes
        return replace(self, workspace_bytes=workspace, recorded_bytes=recorded_bytes)

    def _blocks_in(self, room_bytes: int, most: int) -> int:
        """How many KV blocks fit, ``most`` at most."""
        return bisect_right(range(1, most + 1), room_bytes, key=self.kv_bytes)

    def with_kv_cache(self, kv_bytes: int) -> LoadPlan:
        """This plan with as many KV blocks as ``kv_bytes`` hold."""
        full = PagedKV.slot_bytes(self.shape, len(self.shape.groups[0].layers))
        # If all layers have a window, there is no use for more blocks than sequences can fill, and
        # one for each that the scheduler keeps free.
        most = self.options.sequences * (self.shape.context_blocks + 1)
        if block_bytes := self.shape.block_size * sum(full.values()):
            most = kv_bytes // block_bytes
        return replace(self, num_blocks=self._blocks_in(kv_bytes, most))

    @property
    def _fixed_bytes(self) -> dict[str, int]:
        """Bytes of the cache, the steps and the recent texts besides KV blocks."""
        parts = UnifiedCache.required_bytes(self.shape, 0) | {"workspace": self.workspace_bytes}
        parts |= {"recent texts": self.texts_bytes, "texts to read": self.cells_bytes}
        return {part: size for part, size in parts.items() if size}

    def _room_bytes(self, left_bytes: int) -> int:
        """Bytes that KV blocks may take."""
        return int(left_bytes * self.cache_share) - sum(self._fixed_bytes.values())

    def _misfit(self, left_bytes: int) -> str | None:
        room, asked = self._room_bytes(left_bytes), self.options.kv_cache_bytes
        needed = self.kv_bytes(self.shape.context_blocks)
        one_context = f"one context of {self.shape.max_context} tokens"
        if left_bytes < 0:
            vocabulary = human_bytes(self.vocabulary_bytes)
            besides = f" and the vocabulary {vocabulary}" if self.vocabulary_bytes else ""
            return (
                f"the weights need {human_bytes(self.weights_bytes)}{besides} on "
                f"{self.device}, but only {human_bytes(self.free_bytes)} is free; use a smaller "
                "dtype or model, or free memory"
            )
        texts = self.texts_bytes
        if texts and room < 0 <= room + texts:
            return (
                f"suffix_bytes asks for {human_bytes(texts)}, but only {human_bytes(room + texts)} "
                "is free beside weights, tables and masks; lower it or free memory"
            )
        if asked is not None and asked > room:
            return (
                f"kv_cache_bytes asks for {human_bytes(asked)}, but only "
                f"{human_bytes(max(0, room))} is free beside weights, tables and masks; lower it "
                "or free memory"
            )
        if self.num_blocks >= self.shape.context_blocks and room >= needed:
            return None
        if asked is not None and asked < needed:
            return (
                f"the KV cache of {one_context} needs {human_bytes(needed)}, but kv_cache_bytes "
                f"allows {human_bytes(asked)}; raise it or lower max_context"
            )
        parts = {"kv": 0, **self._fixed_bytes}
        parts["kv"] += needed
        listed = ", ".join(f"{part} {human_bytes(size)}" for part, size in parts.items())
        available = int(left_bytes * self.cache_share)
        return (
            f"{one_context} needs {human_bytes(sum(parts.values()))} ({listed}), but only "
            f"{human_bytes(available)} is free beside the weights; lower max_context or free memory"
        )


def plan_load(
    path: str | Path, options: EngineOptions, checkpoint: Checkpoint | None = None
) -> LoadPlan:
    """The plan for a load with these options. ``checkpoint``: the file, if it is open.

    Reads the model file's metadata and no weights. A model that does not fit is a plan with a
    ``misfit``, not an error.

    Raises:
        InvalidLoadOption: an option is out of its range.
        ModelLoadFailed: the file is missing, damaged or unsupported, or there is no such device.
    """
    checkpoint = checkpoint or open_checkpoint(Path(path))
    for name in ("max_sequences", "max_step_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidLoadOption(f"{name} must be at least 1 (got {value})")
    for chosen in options.sized_for(resolve_device(options.device).type):
        plan = _plan(checkpoint, chosen)
        if plan.suits:
            break
    return plan


def plan_graph(checkpoint: Checkpoint, options: EngineOptions) -> LoadPlan:
    """The plan of a load for vectors or scores alone, whose KV blocks are nobody's concern."""
    sized = next(iter(options.sized_for(resolve_device(options.device).type)))
    # Its cells are the caller's concern, too.
    plain = replace(
        sized,
        cuda_graphs=False,
        kv_dtype="auto",
        drafter="off",
        kv_cache_bytes=None,
        pooling=None,
    )
    return _plan(checkpoint, plain, generates=False)


def _plan(checkpoint: Checkpoint, options: EngineOptions, *, generates: bool = True) -> LoadPlan:
    place, kernels = resolve_device(options.device), options.kernels
    check_kernels(kernels, place)
    config = resolve_config(checkpoint, generates=generates)
    compute = resolve_dtype(
        options.dtype, place, parameters=parameter_count(config), kernels=kernels
    )
    max_context = config.max_context if options.max_context is None else options.max_context
    longest = config.longest_context
    if not 1 <= max_context <= longest:
        raise InvalidLoadOption(
            f"max_context must be at most {longest}, the model's own context, and at least 1 "
            f"(got {max_context})"
        )
    batch_invariant = options.batch_invariant
    if batch_invariant is None:
        batch_invariant = compute is torch.float32
    linears = select_linears(place, compute, kernels, batch_invariant=batch_invariant)
    chosen = choose_ops(
        place,
        compute,
        kernels,
        head_dim=config.head_dim,
        kv_dtype=options.kv_dtype,
        batch_invariant=batch_invariant,
    )
    if options.drafter == "auto":
        is_exact = batch_invariant or chosen.ops.name == "native"
        drafts = is_exact and place.type == "cpu"
        options = replace(options, drafter="suffix" if drafts else "off")
    recorded = options.cuda_graphs and records_decode(place, chosen.ops)
    shape = cache_shape(
        config,
        max_context,
        dtype=compute,
        device=place,
        kv_dtype=options.kv_dtype,
        decode_rows=options.sequences if recorded else 0,
        max_query_tokens=MAX_QUERY_TOKENS if chosen.ops.reads_mask else 0,
        max_sequences=options.sequences,
        max_step_tokens=options.step_tokens,
    )
    plan = LoadPlan(
        checkpoint=checkpoint,
        config=config,
        linears=linears,
        kernels=chosen,
        shape=shape,
        options=options,
        weights_bytes=model_bytes(config, checkpoint, linears, compute),
        workspace_bytes=workspace_bytes(
            config,
            shape,
            chosen.ops,
            max_sequences=options.sequences,
            max_step_tokens=options.step_tokens,
            draft_rows=DRAFT_ROWS if options.drafts else 0,
        ),
        recorded_bytes=estimated_recorded_bytes(config, shape, chosen.ops),
        process_bytes=psutil.Process().memory_info().rss if place.type == "cpu" else 0,
        vocabulary_bytes=(
            vocabulary_bytes(checkpoint, config.vocab_size) if place.type == "cpu" else 0
        ),
        free_bytes=free_bytes(place, options.memory_bytes),
        num_blocks=options.sequences * shape.context_blocks,
    )
    if options.kv_cache_bytes is not None:
        plan = plan.with_kv_cache(options.kv_cache_bytes)
    return plan.fitted_to(plan.free_bytes - plan.weights_bytes - plan.vocabulary_bytes)


def vocabulary_bytes(
    checkpoint: VocabularySource, vocab_size: int, *, generates: bool = True
) -> int:
    """Bytes of the tokenizer, and of the grammars' vocabulary if a worker prepares it, as one that
    ``generates`` does.

    This is a plan; the constants are measured on real files by ``benches.memory_plan``.
    """
    if checkpoint.layout == "gguf":
        kind = checkpoint.metadata.get("tokenizer.ggml.model")
    elif not (file := checkpoint.path / "tokenizer.json").is_file():
        kind = "llama"
    else:
        kind = "t5" if _UNIGRAM.search(read_bytes(file)) else None
    libraries = {"llama": SENTENCEPIECE_BYTES, "t5": UNIGRAM_BYTES}
    each = libraries.get(str(kind), TOKENIZERS_BYTES)
    prepares = generates and vocab_size >= LARGE_VOCABULARY
    return vocab_size * (each + (GRAMMAR_BYTES if prepares else 0))


def cache_shape(
    config: ModelConfig,
    max_context: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
    decode_rows: int = 0,
    max_query_tokens: int = MAX_QUERY_TOKENS,
    max_sequences: int = 0,
    max_step_tokens: int = 0,
) -> CacheShape:
    """The shape of a cache for ``config``."""
    return CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ropes=config.ropes,
        max_context=max_context,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        decode_rows=decode_rows,
        vocab_size=config.vocab_size,
        max_query_tokens=max_query_tokens,
        windows=config.graph.windows,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
    )
