"""An engine around a model that computes nothing.

``python -m llorch_worker.bench.instruments.no_op_engine`` runs the whole worker around it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import cache_shape
from llorch_worker.kernels import select_truncate_rows
from llorch_worker.model import ForwardModel, LlamaConfig, RaggedBatch
from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.sentencepiece_codec import SentencePieceCodec
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, write_model
from llorch_worker.text.tokenizer import Tokenizer

LOGIT_SPREAD = 3.0
"""Standard deviation. As in a language model, a few tokens are likely and none is certain."""
WORKER_VOCABULARY = 512
WORKER_CONTEXT_TOKENS = 64


class NoOpModel:
    """Returns the same random logits at every step."""

    def __init__(self, vocab_size: int, sequences: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self._logits = torch.randn(sequences, vocab_size, generator=chance) * LOGIT_SPREAD

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:  # noqa: ARG002
        """[rows, vocab] float32, which the caller may overwrite."""
        return self._logits[: len(batch.logits_rows)].clone()


def no_op_engine(
    model: ForwardModel, vocab_size: int, *, sequences: int, context_tokens: int
) -> Engine:
    """An engine on the CPU around ``model``, with an invented vocabulary and almost no cache."""
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
        # The dtype in which a large model would compute.
        truncate_rows=select_truncate_rows(cpu),
    )


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """A vocabulary of ``vocab_size`` pieces, each one word."""
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


class NoOpEngine:
    """Replaces the worker's engine class."""

    @classmethod
    def load(
        cls,
        path: Path,  # noqa: ARG003 - the worker's call
        *,
        max_sequences: int,
        progress: Callable[[int, int], None] | None = None,
        **_: Any,
    ) -> Engine:
        """An engine for ``max_sequences`` sequences of up to 64 tokens."""
        torch.set_num_threads(1)
        if progress is not None:
            progress(1, 1)
        return no_op_engine(
            NoOpModel(WORKER_VOCABULARY, max_sequences, seed=0),
            WORKER_VOCABULARY,
            sequences=max_sequences,
            context_tokens=WORKER_CONTEXT_TOKENS,
        )


if __name__ == "__main__":
    from llorch_worker.settings import Settings
    from llorch_worker.worker.main import run_worker

    run_worker(Settings(), engine_class=f"{__spec__.name}:NoOpEngine")
