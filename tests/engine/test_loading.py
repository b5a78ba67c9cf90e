"""A load that fails for want of memory or of a compiler says so in one sentence."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine import Engine, loading
from llorch_worker.engine.memory import load_plan
from llorch_worker.model import Transformer
from tests.engine.conftest import LoadedModel

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
NO_COMPILER = [
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    # As gcc ends where there is no Python.h.
    subprocess.CalledProcessError(1, ["gcc", "main.c", "-O3", "-shared", "-fPIC"]),
]
Fail = Callable[[Exception], None]


@pytest.fixture(params=["weights", "cache", "step"])
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes one part of every load raise."""

    def fail(error: Exception) -> None:
        def load(*_args: Any, **_kwargs: Any) -> None:
            raise error

        if request.param == "weights":
            monkeypatch.setattr(Transformer, "load", load)
        elif request.param == "cache":
            monkeypatch.setattr(UnifiedCache, "allocate", load)
        else:
            monkeypatch.setattr(load_plan, "records_decode", lambda *_: True)
            monkeypatch.setattr(loading, "CudaRecorder", load)

    return fail


def sentence(loaded: LoadedModel) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        Engine.load(loaded.path, device="cpu", max_context=64)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_memory_that_runs_out_is_told_with_planned_and_free(
    loaded: LoadedModel, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda *_: 5 * 2**30)
    monkeypatch.setattr(load_plan, "free_bytes", lambda *_: 5 * 2**30)
    fail(NO_MEMORY)
    said = sentence(loaded)
    for part in ("memory ran out on cpu for", "was planned", "5.0 GiB was free", "lower"):
        assert part in said


@pytest.mark.parametrize("error", NO_COMPILER, ids=["no gcc", "no Python.h"])
def test_a_missing_compiler_is_named(loaded: LoadedModel, fail: Fail, error: Exception) -> None:
    fail(error)
    said = sentence(loaded)
    for part in ("gcc", "Python's headers (python3-dev)", "kernels"):
        assert part in said


def test_a_defect_stays_a_defect(loaded: LoadedModel, fail: Fail) -> None:
    fail(ValueError("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        Engine.load(loaded.path, device="cpu", max_context=64)
