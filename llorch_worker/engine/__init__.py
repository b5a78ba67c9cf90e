"""Continuous batching: many generations share every forward pass of one resident model."""

from llorch_worker.engine.engine import Engine
from llorch_worker.engine.generation import Generation
from llorch_worker.engine.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Generation"]
