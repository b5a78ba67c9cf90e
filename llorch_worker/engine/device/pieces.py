"""Steps of mixed lengths, recorded but for their attention.

Attention depends on the lengths of the step's sequences, which differ from step to step. All else
depends on the number of tokens alone. So what lies between the attentions of two layers is recorded
for some numbers of tokens, and the host launches one graph and the attention for each layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.engine.device.graphs import Recorder
from llorch_worker.kernels import PLAIN, AttentionForm
from llorch_worker.model import ModelConfig, RaggedBatch, Transformer

MOST_TOKENS = 512
"""A larger step takes the device longer than its launches take the host."""
_SIZE_TOKENS = 64


def piece_sizes(max_step_tokens: int) -> list[int]:
    """The recorded numbers of tokens."""
    most = max(1, min(MOST_TOKENS, max_step_tokens))
    return [*range(_SIZE_TOKENS, most + _SIZE_TOKENS, _SIZE_TOKENS)]


class RecordedPieces:
    """A model that computes steps of up to so many tokens from pieces, and all others directly.

    A step takes the smallest recorded size that holds it. The tokens beyond it are computed too,
    except their attention, and never read.
    """

    def __init__(
        self, model: Transformer, cache: UnifiedCache, recorder: Recorder, sizes: Items[int]
    ) -> None:
        """Records these ``sizes``, in ascending order."""
        self._model = model
        self._cache = cache
        self._sizes = sizes
        self._buffers = _Buffers.of(model.config, cache.shape, sizes[-1])
        self._recorded: dict[int, tuple[list[Callable[[], None]], list[_Call]]] = {}
        with torch.inference_mode():
            for size in reversed(sizes):
                self._recorded[size] = self._record(size, recorder)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """See ``ForwardModel``."""
        count, buffers = len(batch.token_ids), self._buffers
        if cache is not self._cache or count > self._sizes[-1]:
            return self._model.forward(batch, cache)
        step = self._model.begin(batch, cache)
        buffers.token_ids[:count].copy_(batch.token_ids)
        pieces, calls = self._recorded[self._sizes[bisect_left(self._sizes, count)]]
        for piece, call in zip(pieces, calls, strict=False):
            piece()
            qkv, out = buffers.qkv[:count], buffers.attended[:count]
            step.attend_into(out, call.layer, qkv, call.form, call.rope)
        pieces[-1]()
        return self._model.finish(batch, buffers.x[:count], buffers.residual[:count])

    def _record(
        self, size: int, recorder: Recorder
    ) -> tuple[list[Callable[[], None]], list[_Call]]:
        buffers = self._buffers
        recorded = _Cut(buffers, size)

        def run(cut: Callable[[], None]) -> None:
            recorded.begin(cut)
            x, residual = self._model.through_blocks(buffers.token_ids[:size], recorded)
            assert residual is not None
            buffers.x[:size].copy_(x)
            buffers.residual[:size].copy_(residual)

        return recorder.record_pieces(run), recorded.calls


@dataclass(frozen=True)
class _Call:
    """An attention between two pieces."""

    layer: int
    form: AttentionForm
    rope: int


@dataclass(frozen=True)
class _Buffers:
    """What pieces and attention exchange, at fixed addresses."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    qkv: torch.Tensor
    """[tokens, heads + 2 * kv_heads, head_dim]"""
    attended: torch.Tensor
    """[tokens, heads * head_dim]"""
    x: torch.Tensor
    """[tokens, hidden], like ``residual``: the two addends after the last layer"""
    residual: torch.Tensor

    @classmethod
    def of(cls, config: ModelConfig, shape: CacheShape, tokens: int) -> _Buffers:
        def numbers(*sizes: int) -> torch.Tensor:
            return torch.zeros(tokens, *sizes, dtype=shape.dtype, device=shape.device)

        heads, head_dim = config.num_heads, config.head_dim
        return cls(
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=shape.device),
            qkv=numbers(heads + 2 * config.num_kv_heads, head_dim),
            attended=numbers(heads * head_dim),
            x=numbers(config.hidden_size),
            residual=numbers(config.hidden_size),
        )


@dataclass
class _Cut:
    """Stands for a forward pass while pieces are recorded; each attention ends one."""

    buffers: _Buffers
    size: int
    calls: list[_Call] = field(default_factory=list)
    cut: Callable[[], None] = lambda: None

    def begin(self, cut: Callable[[], None]) -> None:
        self.calls.clear()
        self.cut = cut

    def attend(
        self, layer: int, qkv: torch.Tensor, form: AttentionForm = PLAIN, rope: int = 0
    ) -> torch.Tensor:
        """See ``ForwardPass``."""
        self.buffers.qkv[: self.size].copy_(qkv)
        self.calls.append(_Call(layer, form, rope))
        self.cut()
        return self.buffers.attended[: self.size]
