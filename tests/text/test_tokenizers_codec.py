"""Vocabularies of tokenizer.json: ids and text must be those of the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.contract import InvalidRequest, ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import open_checkpoint


@pytest.fixture(scope="module")
def transformers_tokenizer(trained_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(trained_model / "hf")


@pytest.fixture(scope="module")
def library(trained_model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(trained_model / "hf" / "tokenizer.json"))


@pytest.mark.parametrize("nothing", [-1, 2**32, 2**80])
def test_an_id_of_no_token_in_the_settings_is_none(
    trained_model: Path, tmp_path: Path, source: Callable[[Path], Any], nothing: int
) -> None:
    (tmp_path / "tokenizer.json").write_text((trained_model / "hf" / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": nothing}))
    assert load_tokenizer(source(tmp_path)).encode("a")


def test_ids_equal_transformers_on_texts_that_tokenizers_get_wrong(
    stories: Tokenizer, transformers_tokenizer: Any, corpus: list[str]
) -> None:
    for text in corpus:
        ids = stories.encode(text, parse_special=True)
        assert ids == transformers_tokenizer.encode(text), text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_ids_equal_transformers_on_any_text(
    stories: Tokenizer, transformers_tokenizer: Any, text: str
) -> None:
    assert stories.encode(text, parse_special=True) == transformers_tokenizer.encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_text_equals_the_librarys(
    stories: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ids = stories.encode(text)
    assert stories.decode(ids) == library.decode(ids)


def test_the_gguf_file_and_the_folder_of_one_model_give_the_same_ids(
    stories: Tokenizer, trained_model: Path, corpus: list[str]
) -> None:
    """Except for texts with a leading space, before which tokenizer.json's Metaspace adds none."""
    gguf = load_tokenizer(open_checkpoint(trained_model / "f32.gguf"))
    assert gguf.vocab_size == stories.vocab_size
    assert gguf.eos_token_ids == stories.eos_token_ids
    for text in corpus:
        if text and text[0] not in " ▁":
            assert gguf.encode(text) == stories.encode(text), text


def test_control_tokens_spelt_out_by_a_user_stay_text(stories: Tokenizer) -> None:
    ids = stories.encode("a <s> b </s> <unk>")
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    assert stories.decode(ids) == "a <s> b </s> <unk>"
    assert stories.encode("</s>", add_special_tokens=False, parse_special=True) == [2]


def test_the_settings_of_a_folder_override_its_post_processor(
    trained_model: Path, tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    definition = (trained_model / "hf" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(definition)
    assert load_tokenizer(source(tmp_path)).encode("a")[0] == 1
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_eos_token": True}))
    tokenizer = load_tokenizer(source(tmp_path))
    ids = tokenizer.encode("a")
    assert 1 not in ids
    assert ids[-1] == 2
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "damaged"),
        ("{}", "damaged"),
        ('{"version": "1.0"', "damaged"),
        ("[1, 2]", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    tmp_path: Path, source: Callable[[Path], Any], content: str, reason: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        load_tokenizer(source(tmp_path))
    assert "\n" not in caught.value.message


def test_a_text_that_the_librarys_expressions_give_up_on_is_refused(
    trained_model: Path, tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    """Its panic is no Exception, and would end the thread that tokenises."""
    definition = json.loads((trained_model / "hf" / "tokenizer.json").read_text())
    doubling = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    steps = [doubling | {"invert": False}, definition["pre_tokenizer"]]
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(source(tmp_path))
    assert tokenizer.encode("aab")
    with pytest.raises(InvalidRequest, match=r"must be able to read it .got 41 characters"):
        tokenizer.encode("a" * 40 + "b")


def test_a_post_processor_that_names_no_token_is_refused(
    trained_model: Path, tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    definition = json.loads((trained_model / "hf" / "tokenizer.json").read_text())
    single = [
        {"SpecialToken": {"id": "<x>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    definition["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelLoadFailed, match="model's tokenizer must be able to read it"):
        load_tokenizer(source(tmp_path))


def test_a_decoder_that_is_not_known_is_refused(
    trained_model: Path, tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    definition = json.loads((trained_model / "hf" / "tokenizer.json").read_text())
    definition["decoder"] = {
        "type": "CTC",
        "pad_token": "<pad>",
        "word_delimiter_token": "|",
        "cleanup": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ModelLoadFailed, match="CTC"):
        load_tokenizer(source(tmp_path))
