from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from llorch_worker.weights import open_checkpoint


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(demo_model))


def test_bos_comes_first_if_the_file_asks_for_it(llama2: Tokenizer) -> None:
    assert llama2.encode("Hi")[0] == llama2.bos_token_id == 1
    assert llama2.encode("") == [1]
    assert llama2.encode("", add_special_tokens=False) == []


def test_llama2_ends_at_its_one_end_token(llama2: Tokenizer, llama2_file: Tokenizer) -> None:
    assert llama2.eos_token_ids == llama2_file.eos_token_ids == {2}
    assert llama2.vocab_size == llama2_file.vocab_size == 32_000


def test_a_lone_surrogate_counts_as_the_replacement_character(any_tokenizer: Tokenizer) -> None:
    assert any_tokenizer.encode("a\ud800b") == any_tokenizer.encode("a\ufffdb")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_the_demo_model_can_write_any_text(demo: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")  # the vocabulary's stand-in for a space
    assert demo.decode(demo.encode(text)) == text


def test_a_single_token_is_readable(llama2: Tokenizer) -> None:
    ids = llama2.encode("Hello\n🖂", add_special_tokens=False)
    assert [llama2.token_text(token_id) for token_id in [1, *ids]] == [
        "<s>", " Hello", "\n", "<0xF0>", "<0x9F>", "<0x96>", "<0x82>",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["f32.gguf", "hf"])
def test_the_vocabulary_alone_gives_the_same_tokenizer(
    trained_model: Path, corpus: list[str], file: str
) -> None:
    whole = load_tokenizer(open_checkpoint(trained_model / file))
    alone = load_tokenizer(open_vocabulary(trained_model / file))
    assert alone.describe() == whole.describe()
    assert [alone.encode(text) for text in corpus] == [whole.encode(text) for text in corpus]


def test_the_vocabulary_of_a_split_model_is_in_its_first_part(
    trained_model: Path, tmp_path: Path
) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.symlink_to(trained_model / "f32.gguf")
    second.touch()
    whole = load_tokenizer(open_vocabulary(first))
    assert load_tokenizer(open_vocabulary(second)).describe() == whole.describe()


def test_a_file_that_is_no_model_has_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("no model")
    for path in (tmp_path / "notes.gguf", tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ModelLoadFailed):
            load_tokenizer(open_vocabulary(path))


def test_the_tokenizer_describes_itself_by_transformers_names(llama2: Tokenizer) -> None:
    assert llama2.describe() == {
        "tokenizer_class": "LlamaTokenizer",
        "vocab_size": 32_000,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "bos_token_id": 1,
        "eos_token": "</s>",
        "eos_token_ids": [2],
    }


def test_threads_may_share_a_tokenizer(any_tokenizer: Tokenizer, corpus: list[str]) -> None:
    texts = corpus * 4
    expected = [any_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(any_tokenizer.encode, texts)) == expected


def test_a_folder_without_a_vocabulary_is_refused(
    tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    with pytest.raises(ModelLoadFailed, match=r"neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(source(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "malformed"),
        (
            "tokenizer_config.json",
            '{"additional_special_tokens": "<call>"}',
            "additional_special_tokens is '<call>', but must be a list of tokens",
        ),
        (
            "special_tokens_map.json",
            '{"extra_special_tokens": ["<call>", 5]}',
            "extra_special_tokens has 5, which is no token",
        ),
        ("tokenizer.model", "no protobuf", "damaged, or not a sentencepiece model"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_sentence(
    sentencepiece_vocabulary: Path,
    tmp_path: Path,
    source: Callable[[Path], Any],
    name: str,
    content: str,
    reason: str,
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        (sentencepiece_vocabulary / "tokenizer.model").read_bytes()
    )
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadFailed, match=reason):
        load_tokenizer(source(tmp_path))


def loads_none_of(modules: set[str], source: str) -> None:
    check = f"import sys\n{source}\nsys.exit(', '.join({modules} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_room_is_light() -> None:
    heavy = {"torch", "transformers", "gguf", "numpy", "jinja2"}
    loads_none_of(heavy, "import llorch_worker.text")


def test_a_vocabulary_is_loaded_without_torch(demo_model: Path) -> None:
    source = (
        "from pathlib import Path\n"
        "from llorch_worker.text import load_tokenizer\n"
        "from llorch_worker.text.vocabulary_file import open_vocabulary\n"
        f"load_tokenizer(open_vocabulary(Path({str(demo_model)!r}))).encode('a')"
    )
    loads_none_of({"torch", "transformers"}, source)
