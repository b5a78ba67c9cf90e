"""The vocabularies of each family against transformers' and the tokenizers library's own parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.pre_tokenizers import PRE_TOKENIZERS
from llorch_worker.text.vocabulary_file import open_vocabulary

GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
OTHERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "roberta-bpe"), GPT_2),
    **dict.fromkeys(
        ("smollm", "refact", "starcoder", "minerva-7b"),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]),
    ),
}
COMPOSING = ("qwen2", "deepseek-r1-qwen", "megrez")
TEXTS = [
    "camelCase HTTPServer ÀÉ élan ǅ DON'T we'Ll I'm'x",
    "12345 1,234.50 ½ Ⅻ ٣٤٥ 12a34",
    "path/to//file /*c*/ a/\n\nb\r\n  \r\n\tx",
    "e\u0301 \u1112\u1161\u11ab \u212b <\u0338 हिन्दी",
    "   leading\u3000wide \u00a0 \n trailing   ",
]
PARTS = [
    " ",
    "  ",
    "\n",
    "'s",
    "'LL",
    "1",
    "23",
    "e\u0301",
    "A",
    "b",
    "Ab",
    "/",
    "\u0338",
    "<",
    "日",
]
CONTROL = "<|eot_id|>"

Load = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture(scope="module")
def load(source: Any) -> Load:
    return lambda metadata: load_tokenizer(source(Path("model.gguf"), "gguf", metadata))


@pytest.fixture(scope="module")
def trained(byte_level_vocabulary: Path) -> dict[str, Any]:
    return dict(open_vocabulary(byte_level_vocabulary / "vocab-only.gguf").metadata)


def converted(architecture: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The vocabulary as transformers reads it from GGUF."""
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    settings = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    settings = {names.get(key, key): value for key, value in settings.items()}
    return convert_gguf_tokenizer(architecture, settings)[0]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_words_are_split_as_in_the_familys_own_tokenizer(
    load: Load, trained: dict[str, Any], corpus: list[str], name: str
) -> None:
    metadata = {**trained, "tokenizer.ggml.pre": name}
    library = converted("llama", metadata)
    if name in OTHERS:
        library.pre_tokenizer = OTHERS[name]
    else:
        assert name in GGUF_PRE_TOKENIZER_SPLITS
    if name in COMPOSING:
        library.normalizer = normalizers.NFC()
    tokenizer = load(metadata)
    for text in [*corpus, *TEXTS]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=True) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from([*PARTS, CONTROL]) | st.text(max_size=4)).map("".join),
    named=st.booleans(),
)
def test_qwens_text_is_composed_between_control_tokens(
    composing: tuple[Tokenizer, tokenizers.Tokenizer], text: str, named: bool
) -> None:
    tokenizer, library = composing
    library.encode_special_tokens = not named
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=named)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, False, named, at_most=len(ids)) == ids


@pytest.fixture(scope="module")
def composing(load: Load, trained: dict[str, Any]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    metadata = {**trained, "tokenizer.ggml.pre": "qwen2"}
    library = converted("qwen2", metadata)
    library.normalizer = normalizers.NFC()
    return load(metadata), library


def test_bos_starts_a_text_where_the_family_has_it_so(load: Load, trained: dict[str, Any]) -> None:
    assert "tokenizer.ggml.add_bos_token" not in trained
    starts = {
        name
        for name in PRE_TOKENIZERS
        if len(load({**trained, "tokenizer.ggml.pre": name}).encode("")) == 1
    }
    assert starts == {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}


@pytest.fixture(scope="module")
def gemma() -> dict[str, Any]:
    """A small vocabulary of Gemma's kind: runs of spaces to match whole, no space in front."""
    typed = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 3), ("\n\n", 4), ("<b>", 4)]
    typed += [(" " * length, 4) for length in range(2, 6)]
    typed += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    typed += [("▁a", 1), ("ab", 1), ("▁ab", 1), ("▁", 1), ("a", 1), ("b", 1), ("\n", 4)]
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in typed],
        "tokenizer.ggml.token_type": [kind for _, kind in typed],
        "tokenizer.ggml.scores": [
            float(-index) if kind == 1 else -1000.0 for index, (_, kind) in enumerate(typed)
        ],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.sampled_from([" ", "  ", " " * 7, "a", "ab", "b", "\n", "\n\n", "<b>", "▁", "日", "\t"])
    ).map("".join)
)
def test_gemmas_spaces_are_merged_as_in_transformers(
    gemmas: tuple[Tokenizer, tokenizers.Tokenizer], text: str
) -> None:
    tokenizer, library = gemmas
    assert tokenizer.encode(text, False) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def gemmas(load: Load, gemma: dict[str, Any]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return load(gemma), converted("gemma3", gemma)


def test_phi_3s_control_tokens_take_the_white_space_after_them(
    load: Load, gemma: dict[str, Any]
) -> None:
    pieces = gemma["tokenizer.ggml.tokens"]
    renamed = ["<|placeholder1|>" if piece == "<pad>" else piece for piece in pieces]
    tokenizer = load({**gemma, "tokenizer.ggml.tokens": renamed})
    end, a = 1, gemma["tokenizer.ggml.tokens"].index("a")
    assert tokenizer.encode("<eos> \n a", False, parse_special=True) == [end, a]
    plain = load(gemma).encode("<eos> \n a", False, parse_special=True)
    assert plain != [end, a]
