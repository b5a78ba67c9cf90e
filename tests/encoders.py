"""A random encoder with a vocabulary of words, as a folder of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import BertForSequenceClassification

from tests.model.test_encoder import VOCABULARY, random_model, write_modules

WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]
LONGEST, WIDTH = 64, 64


def write_vocabulary(folder: Path, breaks: int = 1) -> None:
    """A tokenizer.json of :data:`WORDS`, with so many tokens between the texts of a pair."""
    vocabulary = {token: at for at, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kinds = {1: processors.BertProcessing, 2: processors.RobertaProcessing}
    words.post_processor = kinds[breaks](("[SEP]", 2), ("[CLS]", 1))
    words.decoder = tokenizers.decoders.WordPiece()
    words.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    words.save(str(folder / "tokenizer.json"))


def write_encoder(folder: Path, pooling: str = "pooling_mode_mean_tokens") -> Path:
    """A bi-encoder."""
    random_model().save_pretrained(folder)
    write_modules(folder, {pooling: True}, "Normalize")
    write_vocabulary(folder)
    return folder


def write_cross_encoder(folder: Path, kind: type[Any] = BertForSequenceClassification) -> Path:
    random_model(kind, num_labels=1).save_pretrained(folder)
    write_vocabulary(folder, breaks=1 if kind is BertForSequenceClassification else 2)
    return folder


def text_of(number: int) -> str:
    """Another one for each number, of up to 37 words."""
    return " ".join(WORDS[(number * 31 + at) % len(WORDS)] for at in range(1 + number % 37))
