"""``llorch bench startup`` measures a load beside the reading of its file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.bench.instruments.fresh_load import (
    bytes_from_disk,
    drop_cached,
    load_afresh,
    read_s,
)
from llorch_worker.bench.startup import StartupFigures, from_disk_notes
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.settings import Settings
from tests.bench.conftest import Printed
from tests.bench.test_bench import measured
from tests.cli.command import run
from tests.cli.test_bad_input import sentence

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def document() -> Any:
    return measured("startup", "--passes", "1", "--threads", "1", "--max-context", "64")


def test_a_load_is_measured_beside_its_reading(document: Any) -> None:
    assert (document["passes"], document["max_context"]) == (1, 64)
    assert document["read_s"] > 0
    assert document["read_spread"] is document["ready_spread"] is None
    assert 0 < document["first_token_s"] < document["ready_s"]
    assert document["ratio"] > 0
    assert document["file_bytes"] == STORY_MODEL.stat().st_size
    assert document["provenance"]["threads"] == 1


def test_the_table_fits_80_columns(document: Any, printed: Printed) -> None:
    lines = printed(StartupFigures.model_validate(document))
    for label in ("read the file", "load and first token"):
        assert [line for line in lines if line.startswith(label)], label
    assert not [line for line in lines if "spread" in line], "one pass has none"


def test_planned_bytes_are_without_blocks_that_nothing_has_used(document: Any) -> None:
    larger = load_afresh(Settings(model=STORY_MODEL, max_context=512, max_sequences=512), threads=1)
    kv_bytes = 512 * 32 * 40_960
    rope_bytes = (512 - 64) * 32 * 4
    assert larger.held_bytes - document["held_bytes"] == rope_bytes
    assert larger.planned_bytes < document["planned_bytes"] + kv_bytes / 2
    assert larger.resident_bytes < document["resident_bytes"] + kv_bytes / 2


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a file system in memory")
def test_a_file_that_no_disk_holds_is_noted(tmp_path: Path) -> None:
    folder = SHARED_MEMORY / f"llorch-{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    try:
        model = Path(shutil.copy(STORY_MODEL, folder / "model.gguf"))
        drop_cached([model])
        before = bytes_from_disk()
        assert read_s([model]) > 0
        after = bytes_from_disk()
    finally:
        shutil.rmtree(folder)
    size = STORY_MODEL.stat().st_size
    (note,) = from_disk_notes(size, [size, after - before])
    assert "only 0% of the file came from a disk" in note
    assert from_disk_notes(100, [100, 95]) == ()


def test_a_model_that_does_not_fit_is_not_loaded() -> None:
    ran = run("bench", "startup", "--model", "demo", "--kv-cache-bytes", str(10**15))
    assert "does not fit on cpu with these settings; llorch inspect shows" in sentence(ran, 1)
    assert "measuring" not in ran.err


def test_a_failed_load_is_reported_in_its_own_words() -> None:
    # As if memory had filled up between the plan and the load.
    settings = Settings(model=STORY_MODEL, kv_cache_bytes=10**15)
    with pytest.raises(CommandError, match="the load failed: kv_cache_bytes asks for"):
        load_afresh(settings, threads=1)
