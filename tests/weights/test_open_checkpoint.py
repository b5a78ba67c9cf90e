from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.weights import open_checkpoint

PICKLE = r"is a pickle.*convert the model to safetensors"


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("nowhere.gguf", None, r"nowhere\.gguf does not exist; give a \.gguf"),
        *((f"model{suffix}", Path.touch, PICKLE) for suffix in (".bin", ".pt", ".pth", ".ckpt")),
        ("model.safetensors", Path.touch, "give the folder"),
        ("pipe.gguf", os.mkfifo, "not a regular file"),
        ("x" * 5000, None, "cannot be read"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_path_without_a_model_is_refused_and_not_opened(
    tmp_path: Path, name: str, make: Callable[[Path], None] | None, message: str
) -> None:
    if make is not None:
        make(tmp_path / name)
    with pytest.raises(ModelLoadFailed, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch(mode=0o000)
    with pytest.raises(ModelLoadFailed, match=r"cannot be read .*check"):
        open_checkpoint(path)
