"""``python -m llorch_worker.engine.memory.survey``: what several models are, before one is loaded.

Reads ``{"models": [path, ...], "options": {...}, "resident": 1, "fingerprints": false}``
from its standard input, and writes a list of :class:`.Surveyed` as JSON. A process of its own,
because the one that asks imports no torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from llorch_worker.contract import LlorchError
from llorch_worker.engine.memory.compute_device import free_bytes, resolve_device
from llorch_worker.engine.memory.encoder_plan import EncoderPlan, asked_rule, plan_of
from llorch_worker.engine.memory.load_plan import LoadPlan
from llorch_worker.engine.process.surveying import Surveyed
from llorch_worker.engine_options import EngineOptions
from llorch_worker.model_files.hub import local_path
from llorch_worker.weights import fingerprint, open_checkpoint


def survey(path: Path, options: EngineOptions, resident: int, *, fingerprints: bool) -> Surveyed:
    """What a model is of which ``resident`` are loaded at a time."""
    known = ""
    try:
        checkpoint = open_checkpoint(local_path(path))
        if fingerprints:
            known = fingerprint(checkpoint, asked_rule(checkpoint, options))
        plan = plan_of(checkpoint, options)
        if isinstance(plan, EncoderPlan):
            found = Surveyed(plan.longest_context, tasks=plan.tasks)
        else:
            config, _ = plan.generation_config
            found = Surveyed(plan.shape.max_context, dict(config), tasks=plan.tasks)
    except LlorchError as error:
        return Surveyed(refusal=error.message, fingerprint=known)
    shared = f"; or lower LLORCH_RESIDENT: {resident} models at a time share the memory"
    return replace(
        found,
        refusal=plan.misfit and plan.misfit + (shared if resident > 1 else ""),
        lacks_bytes=_lacking(plan),
        fingerprint=known,
    )


def sharing(options: EngineOptions, resident: int) -> EngineOptions:
    """For one of ``resident`` models that are loaded at a time, while none is."""
    if resident == 1:
        return options
    # Each may take as much, whichever come to lie beside each other.
    share_bytes = free_bytes(resolve_device(options.device)) // resident
    return replace(options, memory_bytes=share_bytes)


def _lacking(plan: LoadPlan | EncoderPlan) -> int:
    """At least 1 if it does not fit."""
    if plan.misfit is None:
        return 0
    return max(1, plan.total_bytes - plan.process_bytes - plan.free_bytes)


def main() -> None:
    asked = json.load(sys.stdin)
    resident = asked["resident"]
    options = sharing(EngineOptions(**asked["options"]), resident)
    found = [
        survey(path, options, resident, fingerprints=asked["fingerprints"])
        for path in map(Path, asked["models"])
    ]
    json.dump(
        [asdict(replace(each, memory_bytes=options.memory_bytes)) for each in found], sys.stdout
    )


if __name__ == "__main__":
    main()
