"""A simulated machine with GPU cards, for the processes of one test; see ``site/``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"
GIB = 2**30


def uuid(number: int) -> str:
    return f"GPU-{number}{number}{number}{number}0000-fake"


def card(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "uuid": uuid(number), "model": "NVIDIA H200", "free": 140 * GIB, "total": 141 * GIB
    } | fields  # fmt: skip


class Machine:
    """Cards that a test may change while processes run."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        self._file = folder / "cards.json"
        self.locks = folder / "locks"
        self.show(*(card(number) for number in range(count)))

    def show(self, *cards: dict[str, Any]) -> None:
        """Replaces the cards."""
        # Atomically, because a process may be reading.
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(cards))
        new.replace(self._file)

    def lose_driver(self) -> None:
        self._file.unlink()

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process on this machine, besides ``SITE`` on its module path."""
        return {"FAKE_CARDS": str(self._file), "LLORCH_DEVICE_LOCKS": str(self.locks)}
