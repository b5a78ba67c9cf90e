"""``llorch bench startup`` measures a load beside what no load can do without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.settings import DEMO_MODEL
from tests.cli.command import run
from tests.cli.test_bad_input import sentence

QUICK = ("--passes", "2", "--threads", "1")
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def document() -> Any:
    ran = run("bench", "startup", "--model", "demo", *QUICK, "--max-context", "64", "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.json


def test_a_load_is_measured_beside_its_reading_and_filling(document: Any) -> None:
    assert document["passes"] == 2
    for seconds in ("read_s", "fill_s", "ready_s"):
        assert document[seconds] > 0
    assert 0 < document["first_token_s"] < document["ready_s"]
    assert document["ratio"] > 0
    assert document["provenance"]["threads"] == 1


def test_what_is_filled_is_what_the_model_holds(document: Any) -> None:
    larger = run("bench", "startup", "--model", "demo", *QUICK, "--max-context", "128", "--json")
    assert document["file_bytes"] == DEMO_MODEL.stat().st_size == larger.json["file_bytes"]
    assert document["held_bytes"] < larger.json["held_bytes"]
    # Python and its libraries are in both.
    assert document["resident_bytes"] == pytest.approx(document["foretold_bytes"], rel=0.2)


def test_a_person_reads_the_table_in_80_columns() -> None:
    ran = run("bench", "startup", "--model", "demo", *QUICK)
    assert ran.code == 0, ran
    for label in ("read the file from disk", "fill as much new memory", "load and first token"):
        (line,) = [line for line in ran.out.splitlines() if line.startswith(label)]
        assert len(line) <= 80
    assert "times what reading and filling take" in ran.out


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a file system in memory")
def test_a_file_that_no_disk_holds_is_told(tmp_path: Path) -> None:
    folder = SHARED_MEMORY / f"llorch-{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    try:
        model = shutil.copy(DEMO_MODEL, folder / "model.gguf")
        ran = run("bench", "startup", "--model", model, *QUICK, "--json")
        assert ran.code == 0, ran
        (note,) = ran.json["notes"]
        assert note.startswith("only 0% of ")
    finally:
        shutil.rmtree(folder)


def test_a_model_that_does_not_fit_is_not_loaded() -> None:
    said = sentence(run("bench", "startup", "--model", "demo", "--kv-cache-bytes", str(10**15)), 1)
    assert said.startswith("kv_cache_bytes asks for ")
