"""The error of every variant of the native kernels, as the benchmark measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benches.dtype_error import measure
from tests.kernels.native import runnable_variants


@pytest.mark.parametrize(("file", "most_nats"), [("q8_0.gguf", 0.0004), ("q4_0.gguf", 0.0005)])
def test_every_variant_stays_close_to_float32(
    trained_model: Path, file: str, most_nats: float
) -> None:
    variants = runnable_variants()
    errors = measure(trained_model / file, "cpu", 250)
    assert [error.kernels for error in errors] == [*variants, "torch"]
    for error in errors:
        assert 0 < error.mean_divergence <= most_nats, error
        assert error.same_top_token > 0.97, error
