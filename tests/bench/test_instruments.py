"""Provenance, and the times of steps on a card; a fake stands in for the card."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llorch_worker.bench.instruments.model_costs import decode_step_bytes
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.instruments.watched_model import WatchedModel
from llorch_worker.cache import UnifiedCache
from llorch_worker.engine import Engine
from llorch_worker.model import RaggedBatch


class Card:
    """A stream on which each pass takes a second, and a host that must not wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.waited: list[float] = []
        card = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "current"
                self.at_s = card.now_s

            def synchronize(self) -> None:
                card.waited.append(self.at_s)

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.at_s - self.at_s)

        def refused(*_: Any) -> None:
            raise AssertionError("the pass waits for the device")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
        monkeypatch.setattr(torch.cuda, "synchronize", refused)

    def forward(self, batch: RaggedBatch, cache: UnifiedCache) -> torch.Tensor:
        self.now_s += 1
        return torch.zeros(len(batch.logits_rows), 4)


def forward(watched: WatchedModel, device: str) -> None:
    """A step of two sequences that hold two of five blocks."""
    rows = torch.arange(2, device=device)
    cache: Any = SimpleNamespace(blocks=SimpleNamespace(total=5, free_count=3))
    watched.forward(RaggedBatch(rows, rows, (1, 1), (3, 5), (), rows), cache)


def test_steps_on_a_card_are_timed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    watched = WatchedModel(card)
    for _ in range(2):
        began_s = time.perf_counter()
        forward(watched, "meta")
        card.now_s += 0.25  # the sampler's
        forward(watched, "meta")
        assert card.waited == []
        first, second = watched.take_steps()
        assert card.waited
        assert began_s <= first.began_s <= time.perf_counter()
        assert first.ended_s - first.began_s == pytest.approx(1)
        assert second.began_s - first.ended_s == pytest.approx(0.25)
        assert (second.sequences, second.tokens) == (2, 2)
        assert (second.kv_blocks, second.kv_tokens) == (2, 8)
        assert watched.take_steps() == ()
        card.waited.clear()
        card.now_s += 1000  # events far from their origin are imprecise


def test_a_pass_on_the_cpu_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedModel(Card(monkeypatch))
    monkeypatch.setattr(torch.cuda, "Event", None)
    before_s = time.perf_counter()
    forward(watched, "cpu")
    (step,) = watched.take_steps()
    assert before_s <= step.began_s <= step.ended_s <= time.perf_counter()


def test_provenance_names_the_card_and_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"a card at {place.index}")
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--out", "a file"])
    origin = provenance(
        device=str(torch.device("cuda:1")),
        seed=0,
        program=("python", "-m", "benches.gpu"),
        measured_with=("pytest",),
    )
    assert origin.machine.device == "cuda:1: a card at 1"
    assert shlex.split(origin.command) == ["python", "-m", "benches.gpu", "--out", "a file"]
    assert origin.versions["pytest"] == pytest.__version__
    assert provenance(device="cpu", seed=0).command == "llorch --out 'a file'"


def test_of_an_embedding_that_is_kept_in_its_blocks_a_step_reads_nothing_else(
    monkeypatch: pytest.MonkeyPatch, random_models: Path
) -> None:
    monkeypatch.setattr("llorch_worker.weights.embedding.SMALL_EMBEDDING_BYTES", 0)
    with Engine.load(random_models / "q8_0.gguf", dtype="bfloat16", max_context=64) as engine:
        config, weights = engine.config, engine.stats().bytes["weights"]
        embedding = engine._loaded.model.embedding.nbytes
        norms = (2 * config.num_layers + 1) * config.hidden_size * engine.cache.kv.dtype.itemsize
        assert decode_step_bytes(engine, 0, 0) == weights - embedding - norms
