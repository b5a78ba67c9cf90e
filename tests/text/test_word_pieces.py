"""WordPiece, BERT's vocabulary, of both kinds of files, against Hugging Face's library."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = string.ascii_lowercase + string.digits + ".,-!'"
TOKENS = [
    *SPECIAL, "[unused0]", *LETTERS, *(f"##{letter}" for letter in LETTERS),
    "hello", "world", "un", "##aff", "##able", "naive", "中", "ß",
]  # fmt: skip
CONTROL, UNKNOWN, NORMAL = 3, 2, 1
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            ["hello", "HELLO ", " world", "unaffable", "naïve", "中国", "ﬁ", "x" * 120]
        ),
    )
).map("".join)


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    vocabulary = {token: at for at, token in enumerate(TOKENS)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(SPECIAL)
    # Hypothesis finds their spellings in the sources, and tries them as texts.
    made.encode_special_tokens = True
    return made


def in_gguf(**changed: Any) -> dict[str, Any]:
    def named(token: str) -> str:
        if token.startswith("["):
            return token
        return token[2:] if token.startswith("##") else f"▁{token}"

    kinds = dict.fromkeys(SPECIAL, CONTROL) | {"[UNK]": UNKNOWN}
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [named(token) for token in TOKENS],
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in TOKENS],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    } | changed


@pytest.fixture(scope="module", params=["folder", "gguf"])
def tokenizer(
    request: Any, library: tokenizers.Tokenizer, source: Any, tmp_path_factory: Any
) -> Tokenizer:
    if request.param == "gguf":
        return load_tokenizer(source(Path("model.gguf"), "gguf", in_gguf()))
    folder = tmp_path_factory.mktemp("bert")
    (folder / "tokenizer.json").write_text(library.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]"}))
    return load_tokenizer(source(folder, "hugging_face", {}))


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_ids_equal_those_of_hugging_faces_library(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    clean = text.encode(errors="replace").decode()
    assert tokenizer.encode(clean) == library.encode(clean).ids


def test_a_texts_own_brackets_are_no_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello [SEP] world", add_special_tokens=False)
    assert 3 not in ids


def test_words_are_put_together_from_their_pieces(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello unaffable World", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello unaffable world"


def test_what_sentence_transformers_reads_in_lower_case_is_read_so(
    library: tokenizers.Tokenizer, source: Any, tmp_path: Path
) -> None:
    cased = tokenizers.Tokenizer.from_str(library.to_str())
    cased.normalizer = normalizers.BertNormalizer(lowercase=False)
    cased.save(str(tmp_path / "tokenizer.json"))
    for says in (False, True):
        file = tmp_path / "sentence_bert_config.json"
        file.write_text(json.dumps({"max_seq_length": 20, "do_lower_case": says}))
        made = load_tokenizer(source(tmp_path, "hugging_face", {}))
        text = "Hello WORLD \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}"
        assert made.encode(text) == cased.encode(text.lower() if says else text).ids


def test_without_a_decoder_tokens_are_put_together_as_the_library_does(
    library: tokenizers.Tokenizer, source: Any, tmp_path: Path
) -> None:
    definition = json.loads(library.to_str()) | {"decoder": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made = load_tokenizer(source(tmp_path, "hugging_face", {}))
    ids = plain.encode("Hello unaffable world").ids
    assert made.encode("Hello unaffable world") == ids
    inside = [*ids[1:3], 3, *ids[3:-1]]
    for each in (ids, inside, inside[2:]):
        assert made.decode(each) == plain.decode(each)


def test_a_gguf_file_may_keep_upper_case(source: Any) -> None:
    metadata = in_gguf(**{"tokenizer.ggml.normalizer.lowercase": False})
    cased = load_tokenizer(source(Path("model.gguf"), "gguf", metadata))
    assert cased.encode("A", add_special_tokens=False) == [1]
    assert cased.encode("a", add_special_tokens=False) == [TOKENS.index("a")]


def test_older_gguf_files_name_the_tokens_around_a_text_as_bert_does(
    library: tokenizers.Tokenizer, source: Any
) -> None:
    kept = ("general.", "tokenizer.ggml.model", "tokenizer.ggml.token", "tokenizer.ggml.unknown")
    metadata = {key: value for key, value in in_gguf().items() if key.startswith(kept)}
    named = {"tokenizer.ggml.cls_token_id": 2, "tokenizer.ggml.seperator_token_id": 3}
    older = load_tokenizer(source(Path("model.gguf"), "gguf", metadata | named))
    assert older.encode("hello world") == library.encode("hello world").ids
    assert older.between_texts == [3]
    with pytest.raises(ModelLoadFailed, match="an encoder's texts need"):
        load_tokenizer(source(Path("model.gguf"), "gguf", metadata))


def test_a_gguf_vocabulary_without_an_unknown_token_is_refused(source: Any) -> None:
    metadata = in_gguf()
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ModelLoadFailed, match="unknown_token_id"):
        load_tokenizer(source(Path("model.gguf"), "gguf", metadata))
