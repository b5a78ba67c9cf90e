"""What the model asks of a device beside matrix products: the seam to device-specific kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from llorch_worker.kernels.layer_kv import LayerKV


@dataclass(frozen=True)
class PagedSequences:
    """Some sequences of one forward pass: where their new tokens and their KV blocks are.

    A sequence's new tokens are the last of its context; their keys and values are in the cache
    before attention runs.
    """

    first_rows: tuple[int, ...]
    """Where each sequence's new tokens begin in the pass's token row."""
    query_lengths: tuple[int, ...]
    """New tokens of each sequence, at least one; all one where sequences decode."""
    context_lengths: tuple[int, ...]
    """Tokens of each sequence in the cache, the new ones included; with ``device_contexts`` the
    most that they may be."""
    block_tables: torch.Tensor
    """[sequences, max_blocks] int64 on the device: KV blocks in order, padded with 0."""
    block_size: int
    """Tokens a KV block."""
    device_contexts: torch.Tensor | None = None
    """[sequences] int64 on the device: the context lengths of a pass that is recorded once and
    replayed with others, where a number of the host's would be baked in. Decode only."""


class CausalMask(Protocol):
    """Views of one causal mask, for kernels that need a mask as a tensor."""

    @property
    def max_query(self) -> int:
        """The most rows of a view."""

    def view(self, query_len: int, context_len: int) -> torch.Tensor:
        """[query_len, context_len] bool, True where one of the last queries may look."""


class PagedAttention(Protocol):
    """Attention of some sequences, prepared once a forward pass and called once a layer."""

    def __call__(self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        """Write softmax(q k / sqrt(head_dim)) v to the rows of ``out`` that the sequences own.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], contiguous, Q's heads first, as
        ``rope_and_write`` left it. ``kv``: one layer's blocks. ``out``: [tokens, heads *
        head_dim], contiguous. Query head h sees KV head h // (heads / kv_heads). Blocks of other
        sequences may hold anything, NaN included.
        """


class Ops(Protocol):
    """The model's operations on one device in one dtype; chosen once, when the model loads.

    Activations and weights have one dtype; reductions are float32 inside. Every implementation
    agrees with ``TorchOps`` but for rounding.
    """

    @property
    def name(self) -> str:
        """How logs and ``llorch doctor`` call it: ``torch``, ``native``, ``triton``."""

    @property
    def recordable(self) -> bool:
        """Whether decode may be recorded and replayed: nothing in it comes from the host, and its
        cost follows from ``device_contexts``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Each row of ``x: [tokens, hidden]`` at a root mean square of one, times ``weight``.

        Root mean square normalisation (arXiv 1910.07467); ``weight``: [hidden].
        """

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rms_norm(s), s)`` for ``s = x + residual``, both [tokens, hidden].

        Both arguments may be overwritten: the caller must not read either again.
        """

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``gate_up: [tokens, 2 * inter]``, gate first: [tokens, inter]."""

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
    ) -> None:
        """Rotate Q and K where they are, and store the new keys and values in the cache.

        Rotary position embedding in the half-split layout (arXiv 2104.09864): each head's pairs
        (i, i + head_dim / 2) turn by their token's angle.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], contiguous: Q's heads, K's, V's.
        ``cos``, ``sin``: [tokens, head_dim / 2] float32. ``slots``: [tokens] int64, block *
        block_size + offset. ``kv``: one layer's blocks.
        """

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        """Attention of sequences with one new token each; index tensors are made here."""

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:
        """Causal attention of sequences with any number of new tokens."""


FusedSample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
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
        """Sets the weights of the excluded tokens to 0; a row that begins with NaN stays as it is.

        Args:
            weights: [any, vocab] float32, the probabilities of all tokens; changed in place.
            scaled: [any, vocab] float32, logits over temperature.
            rows: [truncated] int64, which ones; None for all.
            log_min_p: [truncated] float32, -inf where off.
            top_k: [truncated] int64, the vocabulary's size where off.
            top_p: [truncated] float64, inf where off.
        """
