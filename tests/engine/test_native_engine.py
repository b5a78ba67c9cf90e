"""A whole engine on the native kernels of this processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from llorch_worker.contract import GenerationRequest, InternalError
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.engine_options import Dtype, EngineOptions, KvDtype
from llorch_worker.kernels import native_absence
from tests.kernels.native import runnable_variants

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea. " * 3


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    absence = native_absence()
    if absence is not None:
        pytest.skip(absence)


@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_a_prompt_longer_than_a_step_gives_the_tokens_of_one_step(
    demo_model: Path, kv_dtype: KvDtype
) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_dtype": kv_dtype}
    assert plan_load(demo_model, EngineOptions(**options)).kernels.ops.name == "native"
    request = GenerationRequest(prompt=PROMPT, max_tokens=24, temperature=0)
    answers = []
    for step_tokens in (16, 512):
        with Engine.load(demo_model, max_step_tokens=step_tokens, **options) as engine:
            assert engine.stats().dtype == "bfloat16"
            answers.append(engine.submit(request).result(timeout=60).choices[0].token_ids)
            prompt_tokens = engine.stats().prompt_tokens_total
    assert 16 < prompt_tokens < 512
    assert answers[0] == answers[1]
    assert len(answers[0]) == 24


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "auto")]
)
def test_the_native_kernel_truncates_with_every_dtype(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype, kv_dtype: KvDtype
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("truncated by sorting")

    monkeypatch.setattr("llorch_worker.engine.sampling.truncation.truncate_by_sorting", refuse)
    request = GenerationRequest(prompt="Once", max_tokens=4, top_p=0.5, seed=1, ignore_eos=True)
    with Engine.load(demo_model, device="cpu", dtype=dtype, kv_dtype=kv_dtype) as engine:
        assert len(engine.submit(request).result(timeout=60).choices[0].token_ids) == 4
    with (
        Engine.load(demo_model, device="cpu", dtype=dtype, kernels="torch") as plain,
        pytest.raises(InternalError),
    ):
        plain.submit(request).result(timeout=60)


def test_every_variant_writes_the_same_greedy_text(trained_model: Path) -> None:
    request = GenerationRequest(prompt="Once upon a time", max_tokens=48, temperature=0)
    texts = {}
    for variant in runnable_variants():
        with Engine.load(trained_model / "q8_0.gguf", device="cpu", kernels=variant) as engine:
            assert engine.stats().dtype == "bfloat16"
            texts[variant] = engine.submit(request).result(timeout=60).text
    assert len(set(texts.values())) == 1, texts
