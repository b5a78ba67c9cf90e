"""A damaged model file is refused with a reason, or loads and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.damaged_files import damaged_family, damaged_model, make_families, outcome
from tests.sizes import sized


@pytest.mark.parametrize(
    "seed", [*range(sized(usual=40, full=500)), 10572, 12102, 12849, 12880, 20296, 22071]
)
def test_a_load_of_a_damaged_file_ends(trained_model: Path, tmp_path: Path, seed: int) -> None:
    assert outcome(damaged_model(seed, trained_model, tmp_path)) in ("loaded", "MODEL_LOAD_FAILED")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_families(tmp_path_factory.mktemp("families"))


def test_a_family_loads_if_nothing_is_damaged(families: list[Path]) -> None:
    assert {path.name: outcome(path) for path in families} == {
        path.name: "loaded" for path in families
    }


@pytest.mark.parametrize("seed", range(sized(usual=60, full=500)))
def test_a_load_of_a_damaged_file_of_any_family_ends(
    families: list[Path], tmp_path: Path, seed: int
) -> None:
    ended = outcome(damaged_family(seed, families, tmp_path))
    assert ended in ("loaded", "MODEL_LOAD_FAILED")
