"""What a forward pass must at least read and compute, from the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.model import LlamaConfig


@dataclass(frozen=True)
class ModelCosts:
    """Lower bounds: what intermediate results cost on top is not in them, so that a share of the
    machine's ceiling is never flattered."""

    config: LlamaConfig
    weight_bytes: int
    """All weights as they lie in memory."""
    kv_dtype: torch.dtype
    embedding_bytes: int
    """The input embedding, of which a step reads single rows; 0 where it is the output too."""

    @property
    def matrix_parameters(self) -> int:
        """Parameters that each token is multiplied with, the output matrix left out."""
        config = self.config
        attention = (
            config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
        )
        mlp = 3 * config.hidden_size * config.intermediate_size
        return config.num_layers * (attention + mlp)

    def decode_step_bytes(self, sequences: int, context_tokens: float) -> float:
        """Bytes that one decode step reads: the weights once, and each sequence's keys and values.

        ``context_tokens``: mean length of a sequence.
        """
        config = self.config
        kv_token_bytes = (
            2 * config.num_layers * config.num_kv_heads * config.head_dim * self.kv_dtype.itemsize
        )
        weights = self.weight_bytes - self.embedding_bytes
        return weights + sequences * context_tokens * kv_token_bytes

    def prefill_flops(self, prompts: int, prompt_tokens: int) -> float:
        """Floating-point operations of a causal prefill with logits for each prompt's last token.

        A multiplication and an addition count as two.
        """
        config = self.config
        matrices = 2 * self.matrix_parameters * prompt_tokens
        pairs = prompt_tokens * (prompt_tokens + 1) / 2
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
        output = 2 * config.vocab_size * config.hidden_size
        return prompts * (matrices + attention + output)
