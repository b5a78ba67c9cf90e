"""Vocabularies that no model was trained with."""

from __future__ import annotations

from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.sentencepiece_codec import SentencePieceCodec
from llorch_worker.text.sentencepiece_model import SPACE, Piece, PieceKind, write_model
from llorch_worker.text.tokenizer import Tokenizer


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
