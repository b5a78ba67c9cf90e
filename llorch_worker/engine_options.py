"""How an engine computes and how much it holds: the options of a load, passed whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The fields of ``Settings`` with these names, which describes them."""

    device: str = "auto"
    dtype: str = "auto"
    """A :data:`Dtype`."""
    max_sequences: int = 16
    max_context: int | None = None
    max_step_tokens: int = 512
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

    @property
    def drafts(self) -> bool:
        """Whether something drafts tokens."""
        return self.drafter not in ("auto", "off")
