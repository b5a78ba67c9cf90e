"""A damaged model file is refused with a reason, or loads and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.damaged_files import damaged_model, outcome


@pytest.mark.parametrize("seed", [*range(40), 10572, 12102, 12849, 12880, 20296, 22071])
def test_a_load_of_a_damaged_file_ends(trained_model: Path, tmp_path: Path, seed: int) -> None:
    assert outcome(damaged_model(seed, trained_model, tmp_path)) in ("loaded", "MODEL_LOAD_FAILED")
