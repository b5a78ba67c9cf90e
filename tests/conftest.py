"""Fixtures that every room shares: the models that lie beside the checkout, and the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_MODELS = REPOSITORY.parent / "shared" / "models"


def _shared(name: str) -> Path:
    path = SHARED_MODELS / name
    if not path.exists():
        pytest.skip(f"needs the shared test model {name}, which is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A real trained model of 260K parameters: f32.gguf, q8_0.gguf, q4_0.gguf, hf/."""
    return _shared("stories260K")


@pytest.fixture(scope="session")
def random256() -> Path:
    """Random weights, one GGUF file a block type."""
    return _shared("random256")


@pytest.fixture(scope="session")
def llama2_vocab() -> Path:
    """Llama-2's vocabulary: tokenizer.model and vocab-only.gguf."""
    return _shared("llama2-vocab")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model that the package ships."""
    return REPOSITORY / "llorch_worker" / "assets" / "demo.gguf"
