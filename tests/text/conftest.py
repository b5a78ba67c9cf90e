"""Vocabularies for the text tests, and the sentencepiece library as their judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint

CORPUS = [
    "",
    " ",
    "  ",
    " " * 33,
    "a",
    " a",
    "   a",
    "a ",
    "a   ",
    "a  b   c    d",
    "\t",
    "\ta\t\tb",
    "\n",
    "\n\n\na\r\n\r\nb\n",
    "Once upon a time, there was a little girl named Lily.",
    "The quick brown fox jumps over the lazy dog. 0123456789 3.14159e-10",
    "你好，世界。今天天气怎么样？",
    "日本語のテキスト、カタカナとひらがな",
    "한국어 텍스트",
    "Привет, мир! Ελληνικά עברית العربية हिन्दी ไทย",
    "😀😃 🤦🏼‍♂️ 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343a\u0321l\u0321g\u0322o\u0322",
    "\u200b\u200d\ufeff\u00a0\u3000",
    "ﬁ Å Å ½ ①",  # all of which a normalizer would rewrite
    "\x00",
    "a\x00b\x01\x02\x1b[0m\x7f\x85",
    "\ufdd0\ufffe\U0010ffff",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 𓀀",
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
    "a<s>b</s>c<unk>d<0x0A>e",
    "▁",
    "▁▁a",
    "a▁b ▁ c",
    "def f(x):\n    return {'a': [1, 2, 3]}  # done\n\n\n\tif not x: pass\n",
    "=" * 70 + "-" * 33 + "." * 17 + "#" * 5,
    "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]",
    "http://example.org/a_b?c=d&e=%20#f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]


@dataclass(frozen=True)
class Source:
    """What of a checkpoint the tokenizer looks at, without any weights."""

    path: Path
    layout: str = "hugging_face"
    metadata: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def reference(sentencepiece_vocabulary: Path) -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece library on the file that it trained."""
    return sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_vocabulary / "tokenizer.model")
    )


@pytest.fixture(scope="session")
def llama2(sentencepiece_vocabulary: Path) -> Tokenizer:
    """A vocabulary of Llama-2's kind, out of GGUF."""
    return load_tokenizer(open_checkpoint(sentencepiece_vocabulary / "vocab-only.gguf"))


@pytest.fixture(scope="session")
def llama2_file(sentencepiece_vocabulary: Path) -> Tokenizer:
    """A vocabulary of Llama-2's kind, out of tokenizer.model."""
    return load_tokenizer(Source(sentencepiece_vocabulary))


@pytest.fixture(scope="session")
def stories(trained_model: Path) -> Tokenizer:
    """A vocabulary out of tokenizer.json."""
    return load_tokenizer(open_checkpoint(trained_model / "hf"))


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """A small byte-level vocabulary in the manner of Llama 3, as GGUF metadata."""
    characters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = list(map(chr, characters)) + [chr(0x100 + i) for i in range(256 - len(characters))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "1 2", "12 3", "Ċ Ċ", "ð Ł"]
    merged = [merge.replace(" ", "") for merge in merges]
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokens = [*alphabet, *merged, "Ġworld", *control, "<tool>"]
    first = len(tokens) - 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3, 3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}",
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Source(Path("byte-level.gguf"), "gguf", byte_level_metadata))


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Texts that tokenizers get wrong."""
    return CORPUS


@pytest.fixture(scope="session")
def source() -> type[Source]:
    return Source


@pytest.fixture(scope="session", params=["llama2", "stories", "byte_level"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of vocabulary in turn."""
    tokenizer = request.getfixturevalue(request.param)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
