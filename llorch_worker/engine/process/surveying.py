"""Asks a process of its own what models are, before one is loaded. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llorch_worker.contract import TASK_NAME, ModelLoadFailed
from llorch_worker.engine_options import EngineOptions


@dataclass(frozen=True)
class Surveyed:
    """What a model's file says."""

    max_context: int = 0
    generation_config: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    """Why it cannot be loaded here."""
    tasks: Sequence[str] = (TASK_NAME,)
    """Those that it does."""
    memory_bytes: int | None = None
    """Its share of the free memory, if so many engines have one at a time."""
    lacks_bytes: int = 0
    """If it is refused because the device has too little memory now: how much is missing at
    least."""
    fingerprint: str = ""
    """See :func:`.fingerprint`, if it was asked for."""


def survey(
    paths: Sequence[Path],
    options: EngineOptions,
    resident: int = 1,
    *,
    fingerprints: bool = False,
) -> list[Surveyed]:
    """What each of these models is, of which so many are to be loaded at a time. Raises
    ``ModelLoadFailed`` if that cannot be found out."""
    if not paths:
        return []
    asked = {
        "models": [str(path) for path in paths],
        "options": asdict(options),
        "resident": resident,
        "fingerprints": fingerprints,
    }
    done = subprocess.run(
        [sys.executable, "-m", "llorch_worker.engine.memory.survey"],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise ModelLoadFailed(f"the models' files cannot be read: exit code {done.returncode}")
    return [Surveyed(**each) for each in json.loads(done.stdout)]
