"""The cache of models that tests make."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.made_models import made


def test_of_many_that_ask_at_once_one_makes_the_folder(tmp_path: Path) -> None:
    asked = 8
    makers: list[Path] = []

    def make(folder: Path) -> None:
        makers.append(folder)
        folder.mkdir()
        (folder / "model").write_text("whole")

    with ThreadPoolExecutor(asked) as pool:
        folders = list(pool.map(lambda _: made(tmp_path, "some", make), range(asked)))
    assert len(makers) == 1
    assert [(folder / "model").read_text() for folder in set(folders)] == ["whole"]


def test_a_maker_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise MemoryError

    with pytest.raises(MemoryError):
        made(tmp_path, "some", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["some.lock"]
    assert made(tmp_path, "some", Path.mkdir).is_dir()
