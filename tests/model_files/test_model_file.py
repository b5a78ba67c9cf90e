"""A model file that changes or fails while it is read ends the load with one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.model_file import ModelFile

ROWS, ROW_BYTES = 8, 64


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(ROWS * ROW_BYTES))
    return ModelFile(path)


def read_all(file: ModelFile) -> None:
    file.each_chunk(0, ROWS, ROW_BYTES, 2, lambda first, rows: None)


def test_a_file_that_shrinks_is_refused(file: ModelFile) -> None:
    os.truncate(file.path, ROWS * ROW_BYTES // 2)
    with pytest.raises(ModelLoadFailed, match=r"model\.gguf shrank while it was being read"):
        read_all(file)


def test_a_read_that_fails_names_the_file_and_the_reason(file: ModelFile, tmp_path: Path) -> None:
    # No disk fails on demand; reading a folder fails in the same call.
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, file._descriptor)
    os.close(folder)
    with pytest.raises(ModelLoadFailed, match=r"model\.gguf cannot be read \(Is a directory\)"):
        read_all(file)
