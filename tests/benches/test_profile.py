"""``python -m benches.profile`` divides a step's time among its parts, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benches.profile.profile import ProfileFigures
from benches.profile.ranges import Ranges
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.model import ForwardModel, Transformer
from tests.bench.conftest import Printed
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


def test_the_tables_fit_80_columns(document: Any, printed: Printed) -> None:
    lines = printed(ProfileFigures.model_validate(document))
    for label in ("prefill: ", "decode: ", "  above 10%: "):
        assert [line for line in lines if line.startswith(label)], label


def test_nothing_stays_behind_in_the_engine(demo_model: Path) -> None:
    models: list[Transformer] = []

    def keep(model: ForwardModel) -> ForwardModel:
        assert isinstance(model, Transformer)
        models.append(model)
        return model

    request = GenerationRequest(prompt="Once upon a time", max_tokens=8, temperature=0)
    with Engine.load(demo_model, device="cpu", around_model=keep) as engine:
        (model,) = models
        kinds = (Engine, Transformer, type(model.ops), type(model.output), type(model.blocks[0]))
        before = [dict(vars(kind)) for kind in kinds]
        plain = engine.submit(request).result().text
        with Ranges(model, torch.device("cpu")):
            assert engine.submit(request).result().text == plain
            assert [dict(vars(kind)) for kind in kinds] != before
        assert [dict(vars(kind)) for kind in kinds] == before
