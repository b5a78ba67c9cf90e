"""XLM-RoBERTa's kind of vocabulary, small, as transformers has it and as GGUF files do."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as spm
from transformers import XLMRobertaTokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog; a café's naïve façade, 1234567890.",
    "你好，世界。今天天气怎么样？ 日本語のテキスト、カタカナとひらがな。 한국어 텍스트",
    "Привет, мир! Ελληνικά עברית العربية हिन्दी ไทย <<a>> [b] (s) / \N{GRINNING FACE}",
]
CONTROL = ("<s>", "<pad>", "</s>", "<unk>")


@cache
def unigram() -> tuple[XLMRobertaTokenizer, dict[str, Any]]:
    """transformers' tokenizer, and what llama.cpp's converter writes of the same files."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=file,
        vocab_size=290,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = spm.ModelProto.FromString(file.getvalue())
    charsmap = model.normalizer_spec.precompiled_charsmap
    pieces = [(piece.piece, piece.score) for piece in model.pieces[3:]]
    # Which of these is in a text depends on the score of an unknown character.
    pieces += [("\N{FOX FACE}x", min(score for _, score in pieces)), ("xbxbxb", -0.1)]
    table = [*((token, 0.0) for token in CONTROL), *pieces, ("<mask>", 0.0)]
    # What the converter fills its list with has the row of <mask>, which such a file lacks.
    stored = [*table[:-1], (f"[PAD{len(table) - 2}]", -10_000.0)]
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in stored],
        "tokenizer.ggml.scores": [score for _, score in stored],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * len(pieces), 5],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": list(charsmap),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.cls_token_id": 0,
        "tokenizer.ggml.mask_token_id": len(table) - 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_sep_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    return XLMRobertaTokenizer(table, _spm_precompiled_charsmap=charsmap), metadata


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Writes :func:`unigram`'s into a file."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in unigram()[1].items():
        if key.endswith("charsmap"):
            writer.add_array(key, bytes(value))
        elif key != "general.architecture":
            adders.get(type(value), writer.add_array)(key, value)
