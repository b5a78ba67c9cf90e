"""Which card a thread works on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine import engine as engine_module
from llorch_worker.engine.device import queue
from llorch_worker.engine.memory import load_plan
from llorch_worker.model import RaggedBatch
from tests.engine.conftest import LoadedModel, WatchedModel


def test_the_engines_thread_is_on_its_device_before_its_first_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[object, int]] = []

    def note(what: object) -> None:
        happened.append((what, threading.get_ident()))

    def step(_number: int, _batch: RaggedBatch) -> None:
        note("a step")

    monkeypatch.setattr(queue, "use_device", note)
    with loaded.engine(model=WatchedModel(loaded.model, step)) as engine:
        engine.submit(GenerationRequest(prompt="Once", max_tokens=2)).result(60)
    whats, threads = zip(*happened, strict=True)
    assert whats == (torch.device("cpu"), "a step", "a step")
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_a_load_is_on_its_device_before_it_loads_weights(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chosen(Exception):
        pass

    def choose(device: torch.device) -> None:
        assert device == torch.device("cpu")
        raise Chosen

    monkeypatch.setattr(engine_module, "use_device", choose)
    monkeypatch.setattr(load_plan, "open_checkpoint", pytest.fail)
    with pytest.raises(Chosen):
        Engine.load(Path(loaded.path), device="cpu")
