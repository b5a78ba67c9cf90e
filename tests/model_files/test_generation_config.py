from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from llorch_worker.model_files.generation_config import read_generation_config
from llorch_worker.model_files.gguf_header import read_gguf_header
from llorch_worker.model_files.model_file import ModelFile


def gguf_file(path: Path, **sampling: Any) -> dict[str, Any]:
    """The metadata of a file with these ``general.sampling`` keys."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in sampling.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(read_gguf_header(ModelFile(path)).metadata)


def test_a_gguf_file_says_it_in_32_bits(tmp_path: Path) -> None:
    metadata = gguf_file(
        tmp_path / "a.gguf", temp=0.6, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.05
    )
    assert read_generation_config(metadata) == (
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
        [],
    )


def test_a_penalty_that_looks_at_no_token_is_none(tmp_path: Path) -> None:
    metadata = gguf_file(tmp_path / "a.gguf", penalty_repeat=1.05, penalty_last_n=0)
    assert read_generation_config(metadata) == ({}, [])


def test_what_is_not_done_or_out_of_range_is_named(tmp_path: Path) -> None:
    metadata = gguf_file(tmp_path / "a.gguf", temp=-1.0, mirostat=2, xtc_probability=0.0)
    found, ignored = read_generation_config(metadata)
    assert found == {}
    assert [sentence.split(" is ignored: ")[0] for sentence in ignored] == [
        "the model's general.sampling.temp",
        "the model's general.sampling.mirostat",
    ]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"temperature": 0.7, "do_sample": True, "top_k": 50}, {"temperature": 0.7, "top_k": 50}),
        ({"do_sample": False}, {}),
        ({"temperature": None, "top_p": 0.8, "eos_token_id": [1, 2]}, {"top_p": 0.8}),
        ({"max_new_tokens": 512, "max_length": 4096}, {"max_tokens": 512}),
        ({"temperature": "warm", "min_p": 0.1}, {"min_p": 0.1}),
        ([], {}),
    ],
)
def test_a_folder_says_it_as_vllm_reads_it(said: Any, found: dict[str, Any]) -> None:
    assert read_generation_config({"model_type": "llama", "generation_config": said})[0] == found


def test_an_old_folder_says_it_in_its_config() -> None:
    assert read_generation_config({"model_type": "llama", "temperature": 0.6})[0] == {
        "temperature": 0.6
    }
