"""How an engine computes and how much it holds: the options of a load, passed whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Variant = Literal[
    "amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "neonbf16", "neon"
]
"""The instruction sets that kernels for CPUs are compiled for."""
KernelChoice = Literal["auto", "torch", Variant]
"""``auto``: the fastest for this device and dtype; ``torch``: torch's own; or a CPU's variant."""
KvDtype = Literal["auto", "fp8", "int8"]
"""How the cache stores keys and values. ``auto``: in the compute dtype; ``fp8``: float8 e4m3,
clamped to its range, without a scale; ``int8``: with one float32 scale per token and KV head."""
PrefixSharing = Literal["all", "tenant"]
"""Whose prompts share KV blocks: those of all jobs, or of each tenant apart."""
DrafterChoice = Literal["auto", "off", "lookup", "suffix"]
"""What drafts tokens. ``off``: nothing; ``lookup``: each sequence's own prompt and text;
``suffix``: that and the recent texts of its tenant. ``auto``: ``suffix`` on CPUs where a step's
other rows change no bit, ``off`` elsewhere. A load plan chooses; an engine made from parts has no
drafts then."""

PoolingChoice = Literal["last", "mean", "cls", "rank"]
"""How vectors are made of a text's tokens; ``rank``: none are, but scores, by the yes and no of a
model that judges a pair."""

SEQUENCES: Final = {"cpu": 16, "cuda": 256, "server": 16}
STEP_TOKENS: Final = {"cpu": 512, "cuda": 8192}
"""The defaults by kind of device. A card computes a step of many tokens as fast as one of few, as
long as it waits for its memory."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The fields of ``Settings`` with these names, which describes them."""

    device: str = "auto"
    dtype: str = "auto"
    """A :data:`Dtype`."""
    max_sequences: int | None = None
    max_context: int | None = None
    max_step_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    prefix_sharing: PrefixSharing = "all"
    kernels: KernelChoice = "auto"
    kv_dtype: KvDtype = "auto"
    cuda_graphs: bool = True
    batch_invariant: bool | None = None
    drafter: DrafterChoice = "auto"
    suffix_bytes: int = 8 * 2**20
    low_waits_at_most_s: float = 60.0
    pooling: PoolingChoice | None = None
    memory_bytes: int | None = None
    """The most memory of the device to take; None: what is free. No setting: engines of one worker
    share what was free before the first."""

    @property
    def sequences(self) -> int:
        """``max_sequences``, or a CPU's where no load plan has chosen."""
        return self.max_sequences or SEQUENCES["cpu"]

    @property
    def step_tokens(self) -> int:
        """``max_step_tokens``, or a CPU's where no load plan has chosen."""
        return self.max_step_tokens or STEP_TOKENS["cpu"]

    @property
    def made_of(self) -> Literal["last", "mean", "cls"] | None:
        """How a model that generates makes vectors besides; None if it makes none."""
        return None if self.pooling == "rank" else self.pooling

    @property
    def cell_tokens(self) -> int:
        """For how many tokens of a step of texts a decoder has cells: texts of a block or more
        always fit, though each begins a block of its own."""
        return 2 * self.step_tokens

    def sized_for(self, device_type: str) -> Iterator[EngineOptions]:
        """These with numbers of sequences and tokens where none are given: the device's, then
        halves of them, as far as a CPU's."""
        sequences, tokens = SEQUENCES[device_type], STEP_TOKENS[device_type]
        while sequences >= SEQUENCES["cpu"]:
            yield replace(
                self,
                max_sequences=self.max_sequences or sequences,
                max_step_tokens=self.max_step_tokens or tokens,
            )
            sequences, tokens = sequences // 2, tokens // 2

    @property
    def drafts(self) -> bool:
        """Whether something drafts tokens."""
        return self.drafter not in ("auto", "off")
