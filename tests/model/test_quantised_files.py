"""Quantised files against the same weights, dequantised by gguf and run by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import reference_model
from make_model import writable_types


def assert_same_logits(open_driver: Callable[..., Any], path: Path) -> None:
    model = reference_model(path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (100,), generator=generator)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(open_driver(path).logits(ids.tolist()), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", writable_types())
def test_random_weights_in_every_block_type_give_the_reference_logits(
    open_driver: Callable[..., Any], random_models: Path, kind: str
) -> None:
    assert_same_logits(open_driver, random_models / f"{kind}.gguf")


def test_the_demo_model_gives_the_reference_logits(
    open_driver: Callable[..., Any], demo_model: Path
) -> None:
    assert_same_logits(open_driver, demo_model)
