"""Reads a file's metadata with type checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.bounds import NUMBER, Bound, require


class Reader:
    """``prefix`` is put before each key. All methods raise ModelLoadFailed."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._metadata = metadata
        self._prefix = prefix

    def value(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, bound: Bound = NUMBER) -> int:
        value = self.value(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF may repeat it for each layer
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._unusable(key, value, "a positive integer")
        require(self.path, self._prefix + key, value, bound)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self._unusable(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` positive numbers."""
        value = self.value(key)
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(isinstance(item, bool) or not isinstance(item, int | float) for item in value)
            or not all(0 < item < 1e12 for item in value)
        ):
            raise self._unusable(key, value, f"{count} positive numbers")
        return tuple(map(float, value))

    def refuse_unless(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a setting that would change the results; a missing one is allowed."""
        value = self.value(key)
        if value is not None and value not in allowed:
            raise self.refused(f"{self._prefix}{key} is {str(value)[:50]!r}", why)

    def refused(self, what: str, why: str) -> ModelLoadFailed:
        return ModelLoadFailed(
            f"{self.path}: {what}, but {why}; serve a model of a supported family instead."
        )

    def contradiction(self, what: str) -> ModelLoadFailed:
        return ModelLoadFailed(f"{self.path}: {what}; leave only what is meant in config.json.")

    def _unusable(self, key: str, value: object, wanted: str) -> ModelLoadFailed:
        got = "missing" if value is None else f"{str(value)[:50]!r}"
        return ModelLoadFailed(
            f"{self.path}: {self._prefix}{key} is {got} but the model needs {wanted}; "
            "convert the model again."
        )
