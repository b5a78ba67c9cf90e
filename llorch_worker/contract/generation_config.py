"""How a model's makers sample from it, and requests that name nothing else.

Whoever sends a job applies it, never a worker: a resumed job keeps what its request says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llorch_worker.contract.errors import InvalidRequest
from llorch_worker.contract.request import CONFIG_FIELDS, GenerationRequest

GenerationConfig = dict[str, int | float]
"""Of :data:`CONFIG_FIELDS`, those that the model's files set."""

_GREEDY_FIELDS = ("repetition_penalty", "max_tokens")
"""The fields that change the answer at temperature 0."""


def checked(given: Mapping[str, Any]) -> tuple[GenerationConfig, dict[str, str]]:
    """Those of ``given`` values that a request may have, and why it may not have the others."""
    valid: GenerationConfig = {}
    faulty: dict[str, str] = {}
    for name, value in given.items():
        if name not in CONFIG_FIELDS:
            continue
        whole = isinstance(value, float) and value.is_integer()
        value = int(value) if whole and name in ("top_k", "max_tokens") else value
        try:
            request = GenerationRequest(prompt="any", **{name: value})
        except InvalidRequest as error:
            faulty[name] = str(error.faults[0])
        else:
            valid[name] = getattr(request, name)
    return valid, faulty


def with_generation_config(
    request: GenerationRequest, config: Mapping[str, int | float]
) -> GenerationRequest:
    """``request`` with the makers' values of fields that it does not name."""
    named = request.model_fields_set
    taken: dict[str, Any] = {name: config[name] for name in CONFIG_FIELDS if name in config}
    for name in list(taken):
        greedy = "temperature" in named and request.temperature == 0
        if name in named or (greedy and name not in _GREEDY_FIELDS):
            del taken[name]
    if not taken:
        return request
    taken["generation_config"] = tuple(taken)
    if "max_tokens" in taken:
        # Whoever named no maximum is not told that there is no room for that of the makers.
        taken["max_tokens"] = max(taken["max_tokens"], request.min_tokens)
        taken["cut_max_tokens"] = True
    return request.model_copy(update=taken)
