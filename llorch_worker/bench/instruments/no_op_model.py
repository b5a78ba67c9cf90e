"""A model that computes nothing, and what an engine needs around it."""

from __future__ import annotations

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.engine.runner import ForwardModel
from llorch_worker.kernels import select_truncate_rows
from llorch_worker.model import LlamaConfig, RaggedBatch
from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.sentencepiece_codec import SentencePieceCodec
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, write_model
from llorch_worker.text.tokenizer import Tokenizer

LOGIT_SPREAD = 3.0
"""Standard deviation: as in a language model, a few tokens are likely and none is certain."""


class NoOpModel:
    """Gives the same random logits at every step, whatever it is asked."""

    def __init__(self, vocab_size: int, sequences: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self._logits = torch.randn(sequences, vocab_size, generator=chance) * LOGIT_SPREAD

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:  # noqa: ARG002
        """[rows, vocab] float32, the caller's to overwrite."""
        return self._logits[: len(batch.logits_rows)].clone()


def no_op_engine(
    model: ForwardModel, vocab_size: int, *, sequences: int, context_tokens: int
) -> Engine:
    """An engine on the CPU around ``model`` with a made-up vocabulary and almost no cache."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_context=context_tokens,
        tie_word_embeddings=False,
    )
    cpu = torch.device("cpu")
    shape = cache_shape(config, context_tokens, dtype=torch.float32, device=cpu)
    contexts = sequences + 1  # the scheduler keeps a block free for each sequence
    blocks = contexts * -(-context_tokens // shape.block_size) + sequences
    return Engine(
        model=model,
        config=config,
        cache=UnifiedCache.allocate(shape, blocks),
        tokenizer=made_up_tokenizer(vocab_size),
        model_name="no-op",
        weight_bytes=0,
        max_sequences=sequences,
        # As beside a large model, which computes in it.
        truncate_rows=select_truncate_rows(cpu, torch.bfloat16),
    )


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """Of ``vocab_size`` pieces, each a word of its own."""
    words = (f"{SPACE}w{number}" for number in range(1, vocab_size))
    pieces = [
        Piece("<unk>", 0.0, PieceKind.UNKNOWN),
        *(Piece(word, 0.0, PieceKind.NORMAL) for word in words),
    ]
    codec = SentencePieceCodec(write_model(pieces), pieces)
    return Tokenizer(
        codec,
        prefix_ids=[],
        suffix_ids=[],
        bos_token_id=None,
        eos_token_ids=(),
        chat=Llama2Chat(codec, None, None),
    )
