"""Which changes of a model's files are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.model_files.revision import revision


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("1_Pooling/config.json", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("README.md", False),
        ("onnx/config.json", False),
    ],
)
def test_a_folders_revision_changes_with_each_file_that_a_load_reads(
    tmp_path: Path, name: str, counts: bool
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("a")
    before = revision(tmp_path)
    file.write_text("ab")
    assert (revision(tmp_path) != before) is counts


def test_the_parts_of_a_model_count_and_what_lies_beside_them_does_not(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_text("a")
    assert not revision(first), "a part is missing"
    second.write_text("a")
    before = revision(first)
    (tmp_path / "config.json").write_text("{}")
    assert revision(first) == before
    second.write_text("ab")
    assert revision(first) != before
