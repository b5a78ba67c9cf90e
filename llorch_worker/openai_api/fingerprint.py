"""What a seed's answer depends on besides its request."""

from __future__ import annotations

from hashlib import blake2b
from typing import NotRequired

from typing_extensions import TypedDict

from llorch_worker.contract import GenerationResult, Started

SEPARATOR = "; "


def system_fingerprint(source: Started | GenerationResult) -> str | None:
    """The model, then the arithmetic; None if the worker did not say."""
    arithmetic = source.arithmetic
    if not source.model_fingerprint:
        return None
    text = arithmetic if isinstance(arithmetic, str) else SEPARATOR.join(arithmetic)
    digest = blake2b(text.encode(), digest_size=3).hexdigest()
    return f"fp_{source.model_fingerprint[:12]}_{digest}"


class TakenConfig(TypedDict):
    llorch_generation_config: NotRequired[dict[str, int | float]]
    """What the request did not name and the model's makers have set."""


def taken_config(result: GenerationResult) -> TakenConfig:
    taken = result.generation_config
    return {"llorch_generation_config": taken} if taken else {}
