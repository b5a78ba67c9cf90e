"""A Llama with random weights, and random keys and values, made on the device."""

from __future__ import annotations

import torch

from benches.gpu.random_weights import DENSE, RandomWeights
from llorch_worker.cache import PagedKV, Rope
from llorch_worker.kernels import Ops
from llorch_worker.kernels.layer_kv import INT8_LARGEST
from llorch_worker.model import ModelConfig, Transformer
from llorch_worker.model.block import Attention, Block, Branch, GatedMlp, RmsNorm
from llorch_worker.weights import DenseEmbedding

LLAMA_2_7B = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=1e-5,
    ropes=(Rope(1e4),),
    max_context=4096,
    longest_context=4096,
    tie_word_embeddings=False,
)


def random_llama(
    config: ModelConfig,
    ops: Ops,
    *,
    weights: str = DENSE,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Transformer:
    """``weights``: the type of its matrices, one of ``random_weights.NAMES``; the embedding and the
    norms are in ``dtype``, as in the engine."""
    drawn = RandomWeights(weights, config.num_layers, dtype=dtype, device=device, seed=seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    norm_weight = torch.ones(hidden, dtype=dtype, device=device)

    def norm() -> RmsNorm:
        return RmsNorm(norm_weight.clone(), config.rms_norm_eps, ops)

    def block(layer: int) -> Block:
        return Block(
            around_attention=Branch(norm(), None),
            attention=Attention(
                layer,
                drawn.linear(hidden, ("q", q_rows), ("k", kv_rows), ("v", kv_rows), layer=layer),
                drawn.linear(q_rows, ("o", hidden), layer=layer),
                head_dim=config.head_dim,
            ),
            around_mlp=Branch(norm(), None),
            mlp=GatedMlp(
                drawn.linear(hidden, ("gate", inner), ("up", inner), layer=layer),
                drawn.linear(inner, ("down", hidden), layer=layer),
                ops.silu_and_mul,
            ),
        )

    embedding = drawn.dense(config.vocab_size, hidden)
    blocks = tuple(block(layer) for layer in range(config.num_layers))
    output = drawn.linear(hidden, ("logits", config.vocab_size))
    return Transformer(
        config=config,
        embedding=DenseEmbedding(embedding),
        blocks=blocks,
        final_norm=norm(),
        output=output,
        ops=ops,
        weight_bytes=drawn.total_bytes + (2 * len(blocks) + 1) * norm_weight.nbytes,
    )


def draw_keys_and_values(kv: PagedKV) -> None:
    """Fills the whole cache, of any dtype; needs at most the memory of one layer. Zeros would cost
    the card less power than a worker's real data."""
    for layer in kv.layers:
        for stored, scales in (
            (layer.keys, layer.key_scales),
            (layer.values, layer.value_scales),
        ):
            if scales is not None:
                stored.random_(-int(INT8_LARGEST), int(INT8_LARGEST) + 1)
                scales.fill_(2 / INT8_LARGEST)
            elif stored.dtype.itemsize == 1:
                stored.copy_(torch.randn(stored.shape, dtype=kv.dtype, device=stored.device))
            else:
                stored.normal_()
