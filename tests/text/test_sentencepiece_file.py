"""Folders with a tokenizer.model: ids must be those of transformers, whatever the folder adds.

Texts begin with no space here, and have none behind a token: transformers 5 drops the space that
sentencepiece and transformers 4 put in front of them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer

LLAMA = {"tokenizer_class": "LlamaTokenizer"}
DECODER = {"32000": {"content": "<pad>", "special": True}, "32001": {"content": "<call>"}}
ADDED = {"<pad>": 32000, "<call>": 32001}

Write = Callable[..., Path]


@pytest.fixture
def folder(sentencepiece_vocabulary: Path, tmp_path: Path) -> Write:
    """Writes a folder with a tokenizer.model: ``folder(**{file: content})``."""

    def write(**files: Any) -> Path:
        model = (sentencepiece_vocabulary / "tokenizer.model").read_bytes()
        (tmp_path / "tokenizer.model").write_bytes(model)
        for name, content in {"config": {"model_type": "llama"}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def ids_of(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"added_tokens_decoder": DECODER}},
        {"tokenizer_config": {**LLAMA, "added_tokens_decoder": DECODER}},
        {"tokenizer_config": {**LLAMA, "added_tokens_decoder": DECODER, "legacy": False}},
        {"tokenizer_config": {**LLAMA, "added_tokens_decoder": DECODER, "legacy": True}},
        {
            "tokenizer_config": {
                **LLAMA,
                "added_tokens_decoder": DECODER,
                "legacy": False,
                "add_prefix_space": False,
            }
        },
        {"tokenizer_config": {**LLAMA, "pad_token": "<pad>"}, "added_tokens": ADDED},
        {
            "tokenizer_config": LLAMA,
            "added_tokens": ADDED,
            "special_tokens_map": {"pad_token": "<pad>"},
        },
    ],
)
def test_ids_equal_transformers(
    folder: Write, source: Any, corpus: list[str], files: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    path = folder(**files)
    tokenizer, reference = load_tokenizer(source(path)), AutoTokenizer.from_pretrained(path)
    texts = [text for text in corpus if text[:1] not in ("", " ", "▁")]
    texts += [f"a{token}{text}" for text in texts for token in ("<s>", "<pad>", "<call>")]
    texts += [f"{token}{text}" for text in texts[::3] for token in ("<pad>", "<call>")]
    for text in texts:
        assert ids_of(tokenizer, text) == reference.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    "settings",
    [
        {"additional_special_tokens": ["<pad>", "<call>"], "eos_token": "<call>"},
        {"additional_special_tokens": ["<call>"], "eos_token": "<call>", "pad_token": "<pad>"},
        {"added_tokens_decoder": {"32000": DECODER["32000"]}, "extra_special_tokens": ["<call>"]},
    ],
)
def test_tokens_that_only_the_settings_list_come_behind_the_others_as_in_transformers(
    folder: Write, source: Any, settings: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    path = folder(tokenizer_config={**LLAMA, **settings})
    tokenizer, reference = load_tokenizer(source(path)), AutoTokenizer.from_pretrained(path)
    text = "a<pad>b<call> c"
    assert ids_of(tokenizer, text) == reference.encode(text, add_special_tokens=False)
    ids = reference.convert_tokens_to_ids(["<pad>", "<call>"])
    assert not {*ids} & {*ids_of(tokenizer, text, parse_special=False)}
    assert tokenizer.decode(ids) == ""
    assert tokenizer.eos_token_id == reference.eos_token_id


def test_added_tokens_keep_the_ids_that_the_folder_gives(folder: Write, source: Any) -> None:
    """transformers 5 moves those behind a gap."""
    path = folder(
        tokenizer_config={"added_tokens_decoder": {"32000": DECODER["32000"], "32005": {
            "content": "<call>"}}}
    )  # fmt: skip
    tokenizer = load_tokenizer(source(path))
    assert tokenizer.vocab_size == 32_006
    assert ids_of(tokenizer, "<pad><call>") == [32_000, 32_005]
    assert tokenizer.decode([32_000, 32_003, 32_005]) == "<call>"


def test_an_added_token_takes_the_white_space_that_the_folder_says(
    folder: Write, source: Any, reference: sentencepiece.SentencePieceProcessor
) -> None:
    token = {"content": "<end>", "special": True, "lstrip": True, "rstrip": True}
    path = folder(tokenizer_config={"added_tokens_decoder": {"32000": token}})
    tokenizer = load_tokenizer(source(path))
    a, b = reference.encode("a"), reference.encode("b")
    assert ids_of(tokenizer, "a \n<end> b") == [*a, 32_000, *b]
    assert ids_of(tokenizer, "a <end>", parse_special=False) == reference.encode("a <end>")


def test_a_piece_that_the_folder_calls_a_control_token_is_nobodys_text(
    folder: Write, source: Any, reference: sentencepiece.SentencePieceProcessor
) -> None:
    word = "the"
    (piece,) = reference.encode(word)
    path = folder(tokenizer_config={"eos_token": reference.id_to_piece(piece)})
    tokenizer = load_tokenizer(source(path))
    assert tokenizer.eos_token_ids == {piece, reference.eos_id()}  # its own </s> ends, too
    assert piece not in ids_of(tokenizer, word, parse_special=False)
    assert tokenizer.decode(ids_of(tokenizer, word, parse_special=False)) == word
    assert tokenizer.decode([piece]) == ""


@pytest.mark.parametrize(
    ("token_id", "token", "reason"),
    [
        ("32000", {"single_word": True}, "'<call>' is for single words only"),
        ("99999", {}, "adds a token as id 99999 to a vocabulary of"),
        ("999999999", {}, "an id in added_tokens_decoder is 999999999, but may be at most"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(
    folder: Write, source: Any, token_id: str, token: dict[str, Any], reason: str
) -> None:
    decoder = {token_id: {"content": "<call>", **token}}
    path = folder(tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(ModelLoadFailed, match=reason):
        load_tokenizer(source(path))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (["62"] * 400, "what its normalizer writes is 400, but may be at"),
        # A space becomes three bytes.
        (
            ["20", "62"] * 50,
            "the growth of a text in its normalizer is 300, but may be at most 256",
        ),
    ],
)
def test_a_model_that_writes_pages_for_a_character_is_refused(
    tmp_path: Path, source: Any, written: list[str], reason: str
) -> None:
    rules, model = tmp_path / "rules.tsv", io.BytesIO()
    rules.write_text("61\t" + " ".join(written) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over lazy dogs"] * 50),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_tsv=str(rules),
        hard_vocab_limit=False,
        minloglevel=5,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(ModelLoadFailed, match=reason):
        load_tokenizer(source(tmp_path))
