from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
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


NOBODY = 65534


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A file that this process may not read, not even as root."""
    user = os.geteuid()
    # pytest's own folders are open to their user alone.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.touch(mode=0o000)
        Path(folder).chmod(0o755)
        if user == 0:
            os.seteuid(NOBODY)
        yield path
        os.seteuid(user)


def test_an_unreadable_file_is_refused(unreadable: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"cannot be read .*check"):
        open_checkpoint(unreadable)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("Qwen/Qwen2.5-0.5B", "write hf:Qwen/Qwen2.5-0.5B"),
        ("models/typo.gguf", r"give a \.gguf file"),
    ],
)
def test_a_name_of_the_hub_gets_its_prefix_and_a_file_does_not(path: str, remedy: str) -> None:
    with pytest.raises(ModelLoadFailed, match=remedy):
        open_checkpoint(Path(path))
