"""The Llama model: embedding, blocks, final norm and output matrix over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llorch_worker.cache import UnifiedCache
from llorch_worker.kernels import Ops
from llorch_worker.model import weight_table
from llorch_worker.model.attention import Attention
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.block import Block
from llorch_worker.model.config import LlamaConfig
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.model.rms_norm import RmsNorm
from llorch_worker.model.swiglu import SwiGlu
from llorch_worker.weights import Checkpoint, DenseLinear, FusedWeight, Linear, Linears

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all), as they are kept."""


@dataclass(frozen=True)
class Llama:
    """A resident model. It keeps weights only: what a sequence leaves behind is in the cache."""

    config: LlamaConfig
    embedding: torch.Tensor
    """[vocab, hidden]"""
    blocks: tuple[Block, ...]
    final_norm: RmsNorm
    output: Linear
    ops: Ops
    weight_bytes: int

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: LlamaConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linears: Linears,
        ops: Ops,
        progress: Progress | None = None,
    ) -> Llama:
        """Read the weights onto ``device``, one at a time; activations are of ``dtype``.

        ``config`` is what ``resolve_config`` made of this checkpoint: the tensors are checked.
        ``linears``: how this device and dtype keep matrices; ``ops``: what runs between them.
        """
        return _Loader(checkpoint, config, dtype, device, linears, ops, progress).model()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """Run all new tokens and write their keys and values to the cache.

        Returns logits [rows, vocab] float32 for ``batch.logits_rows``.
        """
        step = ForwardPass(batch, cache, self.ops)
        x = F.embedding(batch.token_ids, self.embedding)  # [tokens, hidden]
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, step)
        if not len(batch.logits_rows):  # a step of prompts that go on in the next one
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        x = x.index_select(0, batch.logits_rows)
        if residual is not None:
            residual = residual.index_select(0, batch.logits_rows)
        normed, _ = self.final_norm.after(x, residual)
        return self.output(normed, wide=True)


class _Loader:
    """Walks the weight table and builds the layers, reporting progress by bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        linears: Linears,
        ops: Ops,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device
        self._linears = linears
        self._ops = ops
        self._progress = progress
        self._total_bytes = weight_table.model_bytes(config, checkpoint, linears, dtype)
        self._done_bytes = 0

    def model(self) -> Llama:
        config = self._config
        embedding, norm, *output = weight_table.global_weights(config)
        embedding_weight = self._tensor(embedding)
        final_norm = self._norm(norm)
        blocks = tuple(self._block(layer) for layer in range(config.num_layers))
        return Llama(
            config=config,
            embedding=embedding_weight,
            blocks=blocks,
            final_norm=final_norm,
            output=(
                DenseLinear(embedding_weight)
                if weight_table.shares_embedding(config, self._linears)
                else self._linear(output[0] if output else embedding)
            ),
            ops=self._ops,
            weight_bytes=self._total_bytes,
        )

    def _block(self, layer: int) -> Block:
        config = self._config
        table = weight_table.layer_weights(config, layer)
        return Block(
            attention_norm=self._norm(table.attention_norm),
            attention=Attention(
                layer,
                self._linear(table.qkv),
                self._linear(table.output),
                head_dim=config.head_dim,
            ),
            mlp_norm=self._norm(table.mlp_norm),
            mlp=SwiGlu(self._linear(table.gate_up), self._linear(table.down), self._ops),
        )

    def _norm(self, weight: FusedWeight) -> RmsNorm:
        return RmsNorm(self._tensor(weight), self._config.rms_norm_eps, self._ops)

    def _linear(self, weight: FusedWeight) -> Linear:
        linear = self._linears.load(self._checkpoint, weight)
        self._report(linear.weight_bytes)
        return linear

    def _tensor(self, weight: FusedWeight) -> torch.Tensor:
        tensor = weight.load(self._checkpoint, self._dtype).to(self._device)
        self._report(tensor.nbytes)
        return tensor

    def _report(self, loaded_bytes: int) -> None:
        self._done_bytes += loaded_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
