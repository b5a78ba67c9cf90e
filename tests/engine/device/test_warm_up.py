"""The steps that a load runs where kernels are compiled late."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest, ModelLoadFailed
from llorch_worker.engine import Engine
from llorch_worker.engine import engine as engine_module
from tests.engine.conftest import LoadedModel

REQUEST = GenerationRequest(prompt="Once upon a time", max_tokens=20, temperature=0)


def load(loaded: LoadedModel) -> Engine:
    return Engine.load(
        loaded.path, device="cpu", max_context=64, max_sequences=5, max_step_tokens=40
    )


@pytest.fixture
def compiled_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "compiles_late", lambda _: True)


@pytest.mark.usefixtures("compiled_late")
def test_a_warm_up_leaves_no_trace_in_what_jobs_get(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(loaded) as warm:
        tokens = warm.submit(REQUEST).result(60).choices[0].token_ids
        warm.check_integrity()
        assert warm.stats().steps_total == 20
    monkeypatch.setattr(engine_module, "compiles_late", lambda _: False)
    with load(loaded) as cold:
        assert cold.submit(REQUEST).result(60).choices[0].token_ids == tokens


@pytest.mark.usefixtures("compiled_late")
def test_it_runs_on_the_engines_own_thread(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def note(*_: Any, max_sequences: int, max_step_tokens: int) -> None:
        assert (max_sequences, max_step_tokens) == (5, 40)
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(engine_module, "warm_up", note)
    with load(loaded) as engine:
        assert threads == [f"llorch-engine-{engine.model_name}"]


@pytest.mark.usefixtures("compiled_late")
def test_where_it_fails_no_engine_is_left_behind(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine_module, "warm_up", fail)
    with pytest.raises(ModelLoadFailed, match="memory ran out on cpu for a step"):
        load(loaded)
    assert not [t for t in threading.enumerate() if t.name == f"llorch-engine-{loaded.path.stem}"]
