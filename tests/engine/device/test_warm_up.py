"""What an engine runs before its first job."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from llorch_worker.contract import GenerationRequest, ModelLoadFailed
from llorch_worker.engine import Engine
from llorch_worker.engine import engine as engine_module
from llorch_worker.engine.device.warm_up import first_requests, measure_steps
from llorch_worker.intake.constraints.compiler import Compiler
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
def test_compiling_leaves_no_trace_in_what_jobs_get(
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
def test_kernels_are_compiled_on_the_engines_own_thread(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[object, ...]] = []

    def note(_model: Any, _cache: Any, *sizes: int) -> None:
        noted.append((threading.current_thread().name, *sizes))

    monkeypatch.setattr(engine_module, "compile_kernels", note)
    with load(loaded) as engine:
        thread = f"llorch-engine-{engine.model_name}"
        assert noted == [(thread, 5, 40, engine._scored_rows)]


@pytest.mark.usefixtures("compiled_late")
def test_a_load_that_cannot_compile_leaves_no_engine_behind(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine_module, "compile_kernels", fail)
    with pytest.raises(ModelLoadFailed, match="memory ran out on cpu for a step"):
        load(loaded)
    assert not [t for t in threading.enumerate() if t.name == f"llorch-engine-{loaded.path.stem}"]


CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("max_sequences", [1, 16, 40])
def test_on_a_card_the_first_requests_are_as_large_as_any_job(max_sequences: int) -> None:
    (first,), full_width = first_requests(CARD, 100, max_sequences, 64)
    assert first.prompt_token_ids is not None
    assert len(first.prompt_token_ids) == 64
    assert sum(request.n for request in full_width) == max_sequences
    assert all(request.top_p < 1 and request.temperature > 0 for request in full_width)


@pytest.mark.parametrize("large", [False, True])
def test_a_warm_up_on_the_cpu_prepares_for_grammars_if_the_vocabulary_is_large(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    prepared: list[Compiler] = []
    monkeypatch.setattr(Compiler, "prepare", lambda compiler: prepared.append(compiler))
    size = loaded.config.vocab_size
    monkeypatch.setattr(engine_module, "LARGE_VOCABULARY", size if large else size + 1)
    with loaded.engine() as engine:
        engine.warm_up()
    assert bool(prepared) == large


def test_a_warm_up_runs_one_token_on_the_cpu_and_measures_memory(loaded: LoadedModel) -> None:
    with loaded.engine() as engine:
        assert engine.stats().measured_bytes == {}
        engine.warm_up()
        stats = engine.stats()
    assert stats.prompt_tokens_total == 1
    # A part that this device does not use takes nothing.
    assert {part: size for part, size in stats.measured_bytes.items() if size} == stats.bytes


@pytest.mark.parametrize("max_context", [1, 2, 3])
def test_a_context_of_any_length_is_warmed_up(loaded: LoadedModel, max_context: int) -> None:
    with Engine.load(loaded.path, device="cpu", max_context=max_context) as engine:
        engine.warm_up()
        assert engine.stats().finished_total == 1
    for group in first_requests(CARD, max_context, 4, 64):
        for request in group:
            assert len(request.prompt_token_ids or ()) + (request.max_tokens or 0) <= max_context


def test_a_larger_step_never_counts_as_faster(loaded: LoadedModel) -> None:
    """However busy the machine was while the smaller one was measured."""
    seconds = measure_steps(loaded.model, loaded.cache(16), 20)
    assert sorted(seconds) == [1, 2, 4, 8, 16, 20]
    assert [seconds[rows] for rows in sorted(seconds)] == sorted(seconds.values())
