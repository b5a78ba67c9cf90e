from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import RobertaTokenizer

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.made_models import WORDS

Load = Callable[[dict[str, Any]], Tokenizer]
SMALL = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁a", "▁", "a"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
}


@pytest.fixture(scope="module")
def load(source: Any) -> Load:
    return lambda metadata: load_tokenizer(source(Path("model.gguf"), "gguf", metadata))


@pytest.fixture(scope="module")
def library(byte_level_metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same vocabulary, built by hand from the library's own parts."""
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split()) for merge in byte_level_metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(max_size=6),
            st.sampled_from(
                ["hello", " hello", "  ", "12345", "\n\n", " world", "<|eot_id|>", "<tool>"]
            ),
        ),
        max_size=12,
    ).map("".join)
)
def test_byte_level_ids_and_text_equal_the_librarys(
    byte_level: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False, parse_special=True)
    assert ids == library.encode(text).ids
    assert byte_level.decode(ids) == library.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_level_text_equals_the_librarys_for_any_ids(
    byte_level: Tokenizer, library: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=20))
    assert byte_level.decode(ids) == library.decode(ids)


def test_a_trained_byte_level_vocabulary_gives_the_librarys_ids_from_both_files(
    byte_level_vocabulary: Path, corpus: list[str]
) -> None:
    library = tokenizers.Tokenizer.from_file(str(byte_level_vocabulary / "tokenizer.json"))
    for path in (byte_level_vocabulary / "vocab-only.gguf", byte_level_vocabulary):
        tokenizer = load_tokenizer(open_vocabulary(path))
        for text in corpus:
            ids = tokenizer.encode(text)
            assert ids == library.encode(text).ids, (path, text)
            assert tokenizer.decode(ids) == text
    assert len(library.encode("Once upon a time").ids) == 5


@pytest.mark.parametrize("says", [True, False])
def test_robertas_texts_and_pairs_have_transformers_ids(
    load: Load, byte_level_vocabulary: Path, corpus: list[str], says: bool
) -> None:
    trained = open_vocabulary(byte_level_vocabulary / "vocab-only.gguf").metadata
    metadata = trained | {
        "general.architecture": "bert",
        "tokenizer.ggml.pre": "roberta-bpe",
        **{f"tokenizer.ggml.add_{name}_token": True for name in ("bos", "eos", "sep") if says},
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = (tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    library = RobertaTokenizer(
        {token: at for at, token in enumerate(tokens)},
        [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        **dict.fromkeys(("bos_token", "cls_token", "unk_token", "pad_token", "mask_token"), bos),
        **dict.fromkeys(("eos_token", "sep_token"), eos),
    )
    tokenizer = load(metadata)
    for text in corpus:
        assert tokenizer.encode(text) == library(text).input_ids, text
    before, behind = tokenizer.around_text
    first, second = (tokenizer.encode(each, add_special_tokens=False) for each in ("a b", "c"))
    pair = [*before, *first, *tokenizer.between_texts, *second, *behind]
    assert pair == library("a b", "c").input_ids


def test_missing_settings_default_to_llamas(load: Load) -> None:
    tokenizer = load(SMALL)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.encode("a") == [1, 3]


def test_the_files_own_settings_are_obeyed(load: Load) -> None:
    settings = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    tokenizer = load({**SMALL, **{f"tokenizer.ggml.{k}": v for k, v in settings.items()}})
    assert tokenizer.encode("a a") == [5, 3, 2]
    assert tokenizer.decode([3, 3]) == " a a"


@pytest.mark.parametrize("nothing", [2**32 - 1, 6, 2**40])
@pytest.mark.parametrize("name", ["padding", "seperator", "mask", "cls", "unknown"])
def test_an_id_that_decides_nothing_is_none_if_the_vocabulary_lacks_it(
    load: Load, caplog: pytest.LogCaptureFixture, name: str, nothing: int
) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    tokenizer = load({**SMALL, key: nothing})
    assert tokenizer.encode("a") == load(SMALL).encode("a")
    assert tokenizer.eos_token_ids == {2}
    assert f"{key} is {nothing}, which is none of the model's 6 tokens" in caplog.text


def test_a_beginning_of_minus_1_is_none(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load({**SMALL, "tokenizer.ggml.bos_token_id": 2**32 - 1})
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("a") == [3]
    assert "bos_token_id is 4294967295, which is none" in caplog.text


def test_ids_of_a_padded_embedding_have_no_text(load: Load) -> None:
    tokenizer = load({**SMALL, "llama.vocab_size": 64})
    assert tokenizer.vocab_size == 64
    assert tokenizer.decode([3, 63, 3]) == "a a"
    assert tokenizer.token_text(63) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": None}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": 7}, "malformed"),
        ({"tokenizer.ggml.model": "t5"}, "unknown kind 't5'"),
        ({"tokenizer.ggml.scores": []}, "6 pieces, 0 scores"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types"),
        ({"tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 99]}, "unknown token types"),
        ({"tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1]}, "256 byte tokens"),
        ({"tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 6]}, "byte token 'a'"),
        ({"tokenizer.ggml.bos_token_id": 6}, "bos_token_id is 6"),
        ({"tokenizer.ggml.eos_token_id": -2}, "eos_token_id is -2"),
        ({"tokenizer.ggml.eos_token_id": float("inf")}, "eos_token_id is inf, which is no token"),
        ({"llama.vocab_size": 10**12}, "model has 1000000000000 tokens"),
    ],
)
def test_a_broken_vocabulary_is_refused_in_one_sentence(
    load: Load, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        load({**SMALL, **change})
    assert caught.value.message.startswith("The tokenizer of model.gguf cannot be used: ")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.pre": "bloom"}, "unknown pre-tokenizer 'bloom'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.merges": []}, "merges"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "damaged"),
    ],
)
def test_a_byte_level_vocabulary_that_cannot_be_read_is_refused(
    load: Load, byte_level_metadata: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        load({**byte_level_metadata, **change})
