"""XLM-RoBERTa's vocabulary out of GGUF, against transformers."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import XLMRobertaTokenizer

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.sentencepiece_model import PieceKind
from tests.unigrams import CONTROL, SENTENCES, unigram

Load = Callable[[dict[str, Any]], Tokenizer]
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
WITH_MASK = {"tokens": "<mask>", "scores": 0.0, "token_type": 3}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from([word for each in SENTENCES for word in each.split()]),
        st.sampled_from(["  ", "ＡＢＣ", "ﬁ", "e\u0301", "\x00\x07", "\u3000", "\x85", "[PAD9]"]),
    )
).map("".join)


@pytest.fixture(scope="module")
def load(source: Any) -> Load:
    return lambda metadata: load_tokenizer(source(Path("model.gguf"), "gguf", metadata))


@pytest.fixture(scope="module", params=["of sentencepiece's file", "of tokenizer.json"])
def tokenizer(request: Any, load: Load) -> Tokenizer:
    """The converter reads either, and writes other tokens and settings of the same vocabulary."""
    metadata = dict(unigram()[1])
    if request.param == "of tokenizer.json":
        for key, last in WITH_MASK.items():
            metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"][:-1], last]
        # It writes `clean_up_tokenization_spaces`, which is about decoding.
        metadata["tokenizer.ggml.remove_extra_whitespaces"] = False
    return load(metadata)


@pytest.fixture(scope="module")
def library() -> XLMRobertaTokenizer:
    return unigram()[0]


def test_ids_equal_those_of_transformers_for_texts_that_tokenizers_get_wrong(
    tokenizer: Tokenizer, library: XLMRobertaTokenizer, corpus: list[str]
) -> None:
    for text in (*corpus, "\N{FOX FACE}xbxbxb"):
        if not any(control in text for control in CONTROL):  # which transformers takes for its own
            assert tokenizer.encode(text) == library(text).input_ids, text


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_ids_equal_those_of_transformers(
    tokenizer: Tokenizer, library: XLMRobertaTokenizer, text: str
) -> None:
    clean = text.encode(errors="replace").decode()
    assume(not any(control in clean for control in (*CONTROL, "<mask>")))
    assert tokenizer.encode(clean) == library(clean).input_ids


def test_a_pair_has_two_tokens_between_its_texts(
    tokenizer: Tokenizer, library: XLMRobertaTokenizer
) -> None:
    before, behind = tokenizer.around_text
    first, second = (tokenizer.encode(each, add_special_tokens=False) for each in ("a b", "c"))
    pair = [*before, *first, *tokenizer.between_texts, *second, *behind]
    assert pair == library("a b", "c").input_ids


def test_a_texts_own_control_tokens_stay_text(tokenizer: Tokenizer) -> None:
    text = "a <s> b</s><pad>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not {0, 1, 2, 3} & {*ids}
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=True)[-2:] == [2, 1]


def test_a_folders_control_tokens_stay_text(tmp_path: Path, source: Any) -> None:
    unigram()[0].save_pretrained(tmp_path)
    folder = load_tokenizer(source(tmp_path, "hugging_face", {}))
    ids = folder.encode("a ＜s＞ b</s><pad>", add_special_tokens=False)
    assert not {0, 1, 2, 3} & {*ids}
    assert folder.decode(ids) == "a <s> b</s><pad>"


def test_control_tokens_stay_text_where_nothing_else_splits_it(tmp_path: Path, source: Any) -> None:
    unigram()[0].save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": None}))
    folder = load_tokenizer(source(tmp_path, "hugging_face", {}))
    assert not {0, 1, 2} & {*folder.encode("a</s>b", add_special_tokens=False)}
    assert 2 in folder.encode("a</s>b", add_special_tokens=False, parse_special=True)


@pytest.mark.parametrize("kind", [PieceKind.UNUSED, PieceKind.BYTE])
def test_what_fills_the_list_of_tokens_is_in_no_text(
    load: Load, library: XLMRobertaTokenizer, kind: PieceKind
) -> None:
    metadata = {k: v for k, v in unigram()[1].items() if k != "tokenizer.ggml.mask_token_id"}
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"][:-1], kind]
    filling = metadata["tokenizer.ggml.tokens"][-1]
    assert load(metadata).encode(filling) == library(filling).input_ids


def test_words_are_put_together_from_their_pieces(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick  brown fox", add_special_tokens=False)
    assert tokenizer.decode(ids) == "The quick brown fox"


def test_a_file_that_does_not_say_what_is_around_a_text_has_what_roberta_has(load: Load) -> None:
    metadata = {k: v for k, v in unigram()[1].items() if not k.startswith("tokenizer.ggml.add_")}
    silent = load(metadata)
    assert (silent.around_text, silent.between_texts) == (([0], [2]), [2, 2])
    metadata |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    assert load(metadata).around_text == ([], [])


def charsmap() -> list[int]:
    whole: list[int] = unigram()[1][CHARSMAP]
    return whole


def pointing_outside() -> list[int]:
    """Its first node leads beyond the trie."""
    return [*charsmap()[:4], *b"\xff\xff\xff\x7f", *charsmap()[8:]]


def with_trie(*nodes: int, written: bytes = b"") -> list[int]:
    """A map whose trie has these nodes."""
    trie = b"".join(node.to_bytes(4, "little") for node in nodes)
    return [*len(trie).to_bytes(4, "little"), *trie, *written]


LEAF = 1 << 31
DAMAGED_MAPS: dict[str, Callable[[], list[int]]] = {
    "without a trie": lambda: [0, 0, 0, 0],
    "of a part of a block": lambda: with_trie(*[0] * 128),
    "of a part of a node": lambda: [2, 4, *with_trie(*[0] * 256)[2:], 0, 0],
    # Node 97 says that its first child, node 0, is a leaf.
    "with a leaf that is none": lambda: with_trie(*[0] * 97, 0x100 | 97 << 10, *[0] * 158),
    "to the middle of a character": lambda: with_trie(*[0] * 255, LEAF | 1, written="é\0".encode()),
}
"""The libraries would panic at a text."""


@pytest.mark.parametrize("kind", DAMAGED_MAPS)
def test_a_map_of_characters_that_leads_to_where_nothing_begins_is_refused(
    load: Load, kind: str
) -> None:
    with pytest.raises(ModelLoadFailed, match="map of characters in its normalizer is damaged"):
        load(unigram()[1] | {CHARSMAP: DAMAGED_MAPS[kind]()})


def test_a_map_of_characters_that_writes_nothing_is_taken(load: Load) -> None:
    assert load(unigram()[1] | {CHARSMAP: with_trie(*[0] * 256)}).encode("a b")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("precompiled_charsmap", lambda: None, "lacks tokenizer.ggml.precompiled_charsmap"),
        ("precompiled_charsmap", lambda: [], "lacks tokenizer.ggml.precompiled_charsmap"),
        ("precompiled_charsmap", lambda: charsmap()[:3], "is damaged"),
        ("precompiled_charsmap", lambda: charsmap()[:100_000], "is damaged"),
        ("precompiled_charsmap", lambda: charsmap()[:200_000], "is damaged"),
        ("precompiled_charsmap", pointing_outside, "is damaged"),
        ("precompiled_charsmap", lambda: "text", "malformed"),
        ("scores", lambda: [0.0] * 7, "7 scores"),
        ("scores", lambda: None, "0 scores"),
        ("token_type", lambda: [3], "1 types"),
        ("unknown_token_id", lambda: 10**6, "unknown_token_id"),
        ("add_space_prefix", lambda: False, "tokenizer.ggml.add_space_prefix is false"),
    ],
)
def test_a_broken_vocabulary_is_refused_in_one_sentence(
    load: Load, name: str, value: Callable[[], Any], reason: str
) -> None:
    changed = {f"tokenizer.ggml.{name}": value()}
    metadata = {k: v for k, v in (unigram()[1] | changed).items() if v is not None}
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        load(metadata)
    assert caught.value.message.startswith("The tokenizer of model.gguf cannot be used: ")
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


def test_a_folders_damaged_map_of_characters_is_refused(tmp_path: Path, source: Any) -> None:
    unigram()[0].save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text())
    definition["normalizer"]["precompiled_charsmap"] = b64encode(bytes(pointing_outside())).decode()
    file.write_text(json.dumps(definition))
    with pytest.raises(ModelLoadFailed, match="map of characters in its normalizer is damaged"):
        load_tokenizer(source(tmp_path, "hugging_face", {}))
