"""A whole engine on the native kernels of this processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.contract import GenerationRequest, InternalError
from llorch_worker.engine import Engine
from llorch_worker.engine_options import Dtype, KvDtype
from llorch_worker.kernels import native_absence


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    absence = native_absence()
    if absence is not None:
        pytest.skip(absence)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "auto")]
)
def test_the_native_kernel_truncates_with_every_dtype(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype, kv_dtype: KvDtype
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("truncated by sorting")

    monkeypatch.setattr("llorch_worker.kernels.torch_ops.truncate_rows", refuse)
    request = GenerationRequest(prompt="Once", max_tokens=4, top_p=0.5, seed=1, ignore_eos=True)
    with Engine.load(demo_model, device="cpu", dtype=dtype, kv_dtype=kv_dtype) as engine:
        assert len(engine.submit(request).result(timeout=60).choices[0].token_ids) == 4
    with (
        Engine.load(demo_model, device="cpu", dtype=dtype, kernels="torch") as plain,
        pytest.raises(InternalError),
    ):
        plain.submit(request).result(timeout=60)
