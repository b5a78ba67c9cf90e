from __future__ import annotations

import os
from pathlib import Path

import pytest

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights import open_checkpoint


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"nowhere\.gguf does not exist; give a \.gguf"):
        open_checkpoint(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_a_pickle_is_refused_without_opening_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.touch()
    with pytest.raises(ModelLoadFailed, match=r"is a pickle.*convert the model to safetensors"):
        open_checkpoint(path)


def test_a_single_file_of_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadFailed, match="give the folder"):
        open_checkpoint(path)


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelLoadFailed, match="not a regular file"):
        open_checkpoint(path)


def test_a_path_that_the_system_rejects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        open_checkpoint(tmp_path / ("x" * 5000))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch(mode=0o000)
    with pytest.raises(ModelLoadFailed, match=r"cannot be read .*check"):
        open_checkpoint(path)
