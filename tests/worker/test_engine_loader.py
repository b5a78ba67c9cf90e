"""An engine and its intake read the same files, whenever somebody replaces them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.process.engine_process import ENGINE
from llorch_worker.settings import Settings
from llorch_worker.worker import engine_loader
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import EngineLoader


class Reader:
    """An intake or an engine, which notes the file that it reads."""

    def __init__(self, path: Path) -> None:
        self.inode = path.stat().st_ino
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def replaced(file: Path) -> None:
    """Puts a copy in its place, as ``mv`` does."""
    copy = shutil.copy(STORY_MODEL, file.with_suffix(".new"))
    os.replace(copy, file)


def test_files_that_are_replaced_between_loads_or_amid_one_are_read_by_engine_and_intake_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(shutil.copy(STORY_MODEL, tmp_path / "model.gguf"))
    loader = EngineLoader(
        Settings(model=file),
        Assignment("cpu"),
        engine_class=ENGINE,
        max_sequences=1,
        report=lambda _: None,
    )
    engines: list[Reader] = []
    replaces = {2}
    """The loads, by number, amid which the file is replaced."""

    def start(_: object) -> Reader:
        loader.intake()
        if len(engines) in replaces:
            replaced(file)
        engines.append(Reader(file))
        return engines[-1]

    monkeypatch.setattr(engine_loader, "IntakeProcess", Reader)
    monkeypatch.setattr(loader, "_start", start)

    def read() -> int:
        """What both have read."""
        [engine, intake] = [loader.load(), loader.intake()]
        assert isinstance(engine, Reader)
        assert isinstance(intake, Reader)
        assert engine.inode == intake.inode == file.stat().st_ino
        return engine.inode

    first, intake = read(), loader.intake()
    assert read() == first
    assert loader.intake() is intake, "one for all engines"
    assert read() != first
    assert [engine.is_closed for engine in engines] == [False, False, True, False]
    second = file.stat().st_ino
    replaced(file)
    assert read() != second
