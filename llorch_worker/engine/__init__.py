"""Continuous batching: many generations share every forward pass of one resident model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llorch_worker.engine.engine import Engine
    from llorch_worker.engine.generation import Generation
    from llorch_worker.engine.interface import EngineStats

__all__ = ["Engine", "EngineStats", "Generation"]
_PLACES = {"Engine": "engine", "EngineStats": "interface", "Generation": "generation"}


def __getattr__(name: str) -> Any:
    # Late, because a worker's keeper uses the interface and must not import torch.
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
