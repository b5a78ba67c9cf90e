"""The model: embedding, blocks, final norm and output matrix over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.kernels import AttentionForm, Ops
from llorch_worker.kernels.native.layers import NativeLayers
from llorch_worker.model import weight_table
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.block import Attention, Block, Branch, GatedMlp, QkNorms, RmsNorm
from llorch_worker.model.config import ModelConfig
from llorch_worker.model.forward_pass import Attends, ForwardPass
from llorch_worker.model.native_layers import native_layers
from llorch_worker.model.weight_table import LayerWeights
from llorch_worker.weights import (
    Checkpoint,
    DenseEmbedding,
    Embedding,
    FusedWeight,
    Linear,
    Linears,
    load_embedding,
)

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, total bytes); both count bytes in memory."""


@dataclass(frozen=True)
class Transformer:
    """A resident model. It holds weights only; the state of sequences is in the cache."""

    config: ModelConfig
    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: RmsNorm
    output: Linear
    ops: Ops
    weight_bytes: int
    native: NativeLayers | None = None
    """Computes what ``blocks`` do, in one call, where :func:`.native_layers` finds that it can."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linears: Linears,
        ops: Ops,
        progress: Progress | None = None,
    ) -> Transformer:
        """Read the weights onto ``device``, one at a time; activations have ``dtype``.

        ``config`` comes from ``resolve_config``, which has checked the tensors. ``linears`` decides
        how matrices are kept; ``ops`` runs between them.
        """
        return _Loader(checkpoint, config, dtype, device, linears, ops, progress).model()

    @property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices that a step multiplies by. Of the embedding it reads a few rows."""
        layers = (
            (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)
            for block in self.blocks
        )
        return self.output.weight_bytes + sum(
            linear.weight_bytes for linears in layers for linear in linears
        )

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """Run all new tokens and write their keys and values to the cache.

        Returns logits [rows, vocab] float32 for ``batch.logits_rows``.
        """
        return self.finish(batch, *self._through_layers(batch, cache))

    @torch.inference_mode()
    def states(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        """As :meth:`forward`, but what the output matrix would read of each token: [tokens, hidden]
        in the compute dtype."""
        states, _ = self.final_norm.after(*self._through_layers(batch, cache))
        return states

    def _through_layers(
        self, batch: RaggedBatch, cache: UnifiedCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        step = self.begin(batch, cache)
        if self.native is not None:
            return step.through(self.native, self._embedded(batch.token_ids))
        return self.through_blocks(batch.token_ids, step)

    def begin(self, batch: RaggedBatch, cache: UnifiedCache) -> ForwardPass:
        """The pass of ``batch``, before the first layer."""
        return ForwardPass(batch, cache, self.ops, self._query_growth(batch.positions))

    def through_blocks(
        self, token_ids: torch.Tensor, step: Attends
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What comes out of the last layer, as two addends; see ``Block``."""
        x = self._embedded(token_ids)
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, step)
        return x, residual

    def finish(
        self, batch: RaggedBatch, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits from what came out of the last layer; see :meth:`forward`."""
        if batch.read_logits is not None:
            batch.read_logits(partial(self._logits, x, residual))
        if not len(batch.logits_rows):  # every prompt of this step continues in the next one
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self._logits(x, residual, batch.logits_rows)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]"""
        x = self.embedding(token_ids)
        if self.config.graph.embedding_scale != 1.0:
            x *= self.config.graph.embedding_scale
        return x

    def _logits(
        self, x: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """[rows, vocab] float32 from the last block's output [tokens, hidden]."""
        x = x.index_select(0, rows)
        if residual is not None:
            residual = residual.index_select(0, rows)
        normed, _ = self.final_norm.after(x, residual)
        logits = self.output(normed, wide=True)
        graph = self.config.graph
        if graph.logit_divisor != 1.0:
            logits /= graph.logit_divisor
        if graph.logit_softcap is not None:
            logits = logits.div_(graph.logit_softcap).tanh_().mul_(graph.logit_softcap)
        return logits

    def _query_growth(self, positions: torch.Tensor) -> torch.Tensor | None:
        """[tokens, 1, 1], by which queries are multiplied; None for 1 everywhere."""
        if self.config.graph.query_growth is None:
            return None
        beta, context = self.config.graph.query_growth
        growth = 1 + beta * torch.log1p((positions // context).float())
        return growth.to(self.embedding.dtype)[:, None, None]


@dataclass
class _Loader:
    """Walks the weight table and builds the layers, reporting progress in bytes."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    linears: Linears
    ops: Ops
    progress: Progress | None
    done_bytes: int = 0

    def __post_init__(self) -> None:
        self.total_bytes = weight_table.model_bytes(
            self.config, self.checkpoint, self.linears, self.dtype
        )

    def model(self) -> Transformer:
        config = self.config
        embedding_weight, norm, *output = weight_table.global_weights(config)
        weight_table.check_tie(self.checkpoint, config)
        embedding = self._embedding(embedding_weight)
        shared = self.linears.shared if config.tie_word_embeddings else None
        final_norm = self._norm(norm)
        blocks = tuple(self._block(layer) for layer in range(config.num_layers))
        return Transformer(
            config=config,
            embedding=embedding,
            final_norm=final_norm,
            blocks=blocks,
            output=(
                shared(embedding.weight)
                if shared is not None and isinstance(embedding, DenseEmbedding)
                else self._linear(output[0] if output else embedding_weight)
            ),
            ops=self.ops,
            weight_bytes=self.total_bytes,
            native=native_layers(blocks, config, self.ops),
        )

    def _block(self, layer: int) -> Block:
        config = self.config
        table = weight_table.layer_weights(config, layer)
        scale = config.graph.residual_scale
        gelu = config.graph.activation == "gelu_tanh"
        act_and_mul = self.ops.gelu_and_mul if gelu else self.ops.silu_and_mul
        return Block(
            around_attention=Branch(
                self._norm_or_none(table.before_attention),
                self._norm_or_none(table.after_attention),
                scale,
            ),
            attention=self._attention(table, layer),
            around_mlp=Branch(
                self._norm_or_none(table.before_mlp), self._norm_or_none(table.after_mlp), scale
            ),
            mlp=GatedMlp(self._linear(table.gate_up), self._linear(table.down), act_and_mul),
        )

    def _attention(self, table: LayerWeights, layer: int) -> Attention:
        config, norms = self.config, None
        if table.q_norm is not None and table.k_norm is not None:
            q, k = self._norm(table.q_norm), self._norm(table.k_norm)
            norms = QkNorms(q, k, config.num_heads, config.num_kv_heads)
        return Attention(
            layer,
            self._linear(table.qkv),
            self._linear(table.output),
            head_dim=config.head_dim,
            rope=config.rope_index(layer),
            form=AttentionForm(
                scale=config.graph.attention_scale,
                window=config.window(layer),
                softcap=config.graph.softcap,
            ),
            bias=None if table.qkv_bias is None else self._tensor(table.qkv_bias),
            norms=norms,
        )

    def _norm(self, weight: FusedWeight) -> RmsNorm:
        stored = weight.load(self.checkpoint, torch.float32) + self.config.norm_offset
        kept = stored.to(self.device, self.dtype)
        self._report(kept.nbytes)
        return RmsNorm(kept, self.config.rms_norm_eps, self.ops)

    def _norm_or_none(self, weight: FusedWeight | None) -> RmsNorm | None:
        return None if weight is None else self._norm(weight)

    def _linear(self, weight: FusedWeight) -> Linear:
        linear = self.linears.load(self.checkpoint, weight)
        self._report(linear.weight_bytes)
        return linear

    def _embedding(self, weight: FusedWeight) -> Embedding:
        as_stored = self.linears.embedding_as_stored
        embedding = load_embedding(
            self.checkpoint, weight, self.dtype, self.device, as_stored=as_stored
        )
        self._report(embedding.nbytes)
        return embedding

    def _tensor(self, weight: FusedWeight) -> torch.Tensor:
        tensor = weight.load(self.checkpoint, self.dtype).to(self.device)
        self._report(tensor.nbytes)
        return tensor

    def _report(self, loaded_bytes: int) -> None:
        self.done_bytes += loaded_bytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)
