"""``python -m benches.profile`` divides a step's time among its parts, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benches.program import run_program

QUICK = ("--prompt-tokens", "40", "--new-tokens", "12", "--concurrency", "4", "--threads", "1")


def measured(*options: str) -> Any:
    """The document of a run with the demo model."""
    ran = run_program("benches.profile", "--model", "demo", *options, "--json")
    assert ran.code == 0, ran
    return ran.json


@pytest.fixture(scope="module")
def document() -> Any:
    return measured(*QUICK)


def test_shares_add_up_to_the_step_and_give_amdahls_bound(document: Any) -> None:
    prefill, decode = document["phases"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert prefill["steps"] == 1  # 160 tokens fit a step
    assert decode["steps"] == 11  # the prefill gives the first of 12 tokens
    assert document["notes"] == []
    for phase in (prefill, decode):
        shares = {part["component"]: part["share"] for part in phase["components"]}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        step_ms = sum(part["ms_per_step"] for part in phase["components"])
        assert step_ms == pytest.approx(phase["step_ms"], rel=1e-3)
        matrices = [name for name in shares if "projection" in name or name == "output matrix"]
        kept = sum(shares[name] for name in (*matrices, "attention"))
        assert phase["elsewhere_share"] == pytest.approx(1 - kept, abs=1e-3)
        assert phase["refactor_bound"] == pytest.approx(1 / kept, rel=1e-2)
        assert 0 < phase["in_python_share"] < 1
