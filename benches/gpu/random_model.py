"""A Llama of random weights made on the device: no file, no copy, seconds for 7B."""

from __future__ import annotations

import torch

from llorch_worker.kernels import Ops
from llorch_worker.model import Llama, LlamaConfig
from llorch_worker.model.attention import Attention
from llorch_worker.model.block import Block
from llorch_worker.model.rms_norm import RmsNorm
from llorch_worker.model.swiglu import SwiGlu
from llorch_worker.weights import DenseLinear

LLAMA_2_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_context=4096,
    tie_word_embeddings=False,
)


def random_llama(
    config: LlamaConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Llama:
    """Weights of a standard deviation that keeps activations of the order of one."""
    generator = torch.Generator(device).manual_seed(seed)
    total = 0

    def matrix(rows: int, columns: int) -> torch.Tensor:
        nonlocal total
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        weight.normal_(std=columns**-0.5, generator=generator)
        total += weight.nbytes
        return weight

    def norm() -> RmsNorm:
        nonlocal total
        weight = torch.ones(config.hidden_size, dtype=dtype, device=device)
        total += weight.nbytes
        return RmsNorm(weight, config.rms_norm_eps, ops)

    def block(layer: int) -> Block:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows = config.num_heads * config.head_dim
        qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim
        return Block(
            attention_norm=norm(),
            attention=Attention(
                layer,
                DenseLinear(matrix(qkv_rows, hidden)),
                DenseLinear(matrix(hidden, q_rows)),
                head_dim=config.head_dim,
            ),
            mlp_norm=norm(),
            mlp=SwiGlu(
                DenseLinear(matrix(2 * inner, hidden)), DenseLinear(matrix(hidden, inner)), ops
            ),
        )

    return Llama(
        config=config,
        embedding=matrix(config.vocab_size, config.hidden_size),
        blocks=tuple(block(layer) for layer in range(config.num_layers)),
        final_norm=norm(),
        output=DenseLinear(matrix(config.vocab_size, config.hidden_size)),
        ops=ops,
        weight_bytes=total,
    )
