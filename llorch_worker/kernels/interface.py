"""The interface of the device-specific kernels: the model's operations except matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels.layer_kv import LayerKV


@dataclass(frozen=True)
class PagedSequences:
    """Some sequences of one forward pass: the places of their new tokens and KV blocks.

    A sequence's new tokens are the last of its context; their keys and values are in the cache
    before attention runs.
    """

    first_rows: tuple[int, ...]
    """Where each sequence's new tokens begin in the token row of the pass."""
    query_lengths: tuple[int, ...]
    """New tokens of each sequence, at least one; exactly one in decode."""
    context_lengths: tuple[int, ...]
    """Tokens of each sequence in the cache, including the new ones; upper bounds with
    ``device_contexts``."""
    block_tables: torch.Tensor
    """[sequences, max_blocks] int32 on the device: KV blocks in order, then any."""
    block_size: int
    """Tokens per KV block."""
    device_contexts: torch.Tensor | None = None
    """[sequences] int64 on the device: the context lengths of a pass that is recorded once and
    replayed with others; a recording would freeze numbers of the host. Decode only."""

    def __post_init__(self) -> None:
        # A kernel would read other blocks from numbers of another width.
        if self.block_tables.dtype is not torch.int32:
            raise TypeError(f"block tables must be int32 (got {self.block_tables.dtype})")


class CausalMask(Protocol):
    """Views of one causal mask, for kernels that need a mask as a tensor."""

    @property
    def max_query(self) -> int:
        """The largest ``query_len`` of a view."""

    def view(self, query_len: int, context_len: int) -> torch.Tensor:
        """[query_len, context_len] bool, True where one of the last queries may attend."""


@dataclass(frozen=True)
class AttentionForm:
    """What the layers of a model may differ in."""

    scale: float | None = None
    """The factor of q k; None for head_dim ** -0.5."""
    window: int | None = None
    """The query at position p sees the keys at positions above p - window; None for all keys."""
    softcap: float | None = None
    """Scaled scores s become softcap * tanh(s / softcap) before the mask; None leaves them."""

    def scale_for(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def window_in(self, context_length: int) -> int | None:
        """The window, or None if it hides nothing in contexts of at most this length."""
        return None if self.window is None or self.window >= context_length else self.window


PLAIN = AttentionForm()
"""Llama's."""


@dataclass(frozen=True, kw_only=True)
class AttentionRoom:
    """The largest attention of an engine."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_context: int
    max_sequences: int
    max_step_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Those that its layers have; see ``AttentionForm``."""
    device_type: str = "cpu"
    softcap: bool = False
    """Whether scores have a cap."""
    kv_dtype: KvDtype = "auto"
    mask_rows: int = 0
    """Of the causal mask."""

    @property
    def gathered_bytes(self) -> int:
        """Of the keys and values of one full context."""
        return 2 * self.max_context * self.kv_heads * self.head_dim * self.dtype.itemsize


class PagedAttention(Protocol):
    """Attention of some sequences, prepared once per forward pass and called once per layer."""

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        """Write softmax(q k * scale) v to the sequences' rows of ``out``, as ``form`` says.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], contiguous, Q's heads first, as
        ``rope_and_write`` left it. ``kv``: one layer's blocks. ``out``: [tokens, heads *
        head_dim], contiguous. Query head h sees KV head h // (heads / kv_heads). Blocks of other
        sequences may hold anything, NaN included; so may blocks before the first query's window.
        """


class Ops(Protocol):
    """The model's operations on one device in one dtype, chosen when the model loads.

    Activations and weights share one dtype; reductions use float32. Every implementation agrees
    with ``TorchOps`` except for rounding.
    """

    @property
    def name(self) -> str:
        """For logs and ``llorch doctor``: ``torch``, ``native`` or ``triton``."""

    @property
    def recordable(self) -> bool:
        """Whether decode can be recorded and replayed: it reads nothing from the host, and its
        cost follows from ``device_contexts``."""

    @property
    def reads_mask(self) -> bool:
        """Whether ``paged_prefill`` reads the mask, rather than derive it from positions."""

    def attention_bytes(self, room: AttentionRoom) -> int:
        """The most memory that attention of one layer takes besides its arguments."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Scale each row of ``x: [tokens, hidden]`` to a root mean square of one, times ``weight``.

        Root mean square normalisation (arXiv 1910.07467); ``weight``: [hidden].
        """

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rms_norm(s), s)`` for ``s = x + residual``, both [tokens, hidden].

        Both arguments may be overwritten.
        """

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``gate_up: [tokens, 2 * inter]``, gate first: [tokens, inter]."""

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As ``silu_and_mul`` with GELU (arXiv 1606.08415) in its approximation by tanh."""

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
    ) -> None:
        """Rotate Q and K in place, and store the new keys and values in the cache.

        Rotary position embedding (arXiv 2104.09864) in the half-split layout: each head's pairs
        (i, i + head_dim / 2) rotate by their token's angle.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], contiguous: Q's heads, K's, V's.
        ``cos``, ``sin``: [tokens, head_dim / 2] float32. ``slots``: [tokens] int64, block *
        block_size + offset. ``kv``: one layer's blocks.
        """

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        """Attention of sequences with one new token each; creates the index tensors."""

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:
        """Causal attention of sequences with any number of new tokens. ``mask`` has no rows if
        ``reads_mask`` is false."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The parameters of a batch's rows on the device, in the form that ``FusedSample`` takes."""

    temperatures: torch.Tensor
    """[rows] float32; 0 takes the row's first maximum."""
    log_min_p: torch.Tensor
    """[rows] float32, -inf if off."""
    top_k: torch.Tensor
    """[rows] int64, the vocabulary's size if off."""
    top_p: torch.Tensor
    """[rows] float64, inf if off."""
    seeds: torch.Tensor
    """[rows] int64, non-negative."""
    truncates: bool
    """Whether a row has min_p, top_k or top_p."""


FusedSample = Callable[[torch.Tensor, SampledRows, torch.Tensor], torch.Tensor]
"""``torch_ops.sample``, or a kernel that does the same in one launch."""


class TruncateRows(Protocol):
    """min_p, top_k and top_p of many rows at once, on the CPU."""

    def __call__(
        self,
        weights: torch.Tensor,
        scaled: torch.Tensor,
        rows: torch.Tensor | None,
        log_min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> None:
        """Set the weights of excluded tokens to 0; a row that begins with NaN stays as it is.

        Args:
            weights: [any, vocab] float32, the probabilities of all tokens; changed in place.
            scaled: [any, vocab] float32, logits over temperature.
            rows: [truncated] int64, the rows to truncate; None for all.
            log_min_p: [truncated] float32, -inf if off.
            top_k: [truncated] int64, the vocabulary's size if off.
            top_p: [truncated] float64, inf if off.
        """
