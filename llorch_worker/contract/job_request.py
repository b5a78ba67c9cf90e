"""What the requests of all tasks have in common."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llorch_worker.contract.errors import InvalidRequest
from llorch_worker.contract.request_faults import fault_of
from llorch_worker.contract.shown import describe
from llorch_worker.contract.values import broken_rules, small_json

LONGEST_DEADLINE_S = 7 * 24 * 3600
MAX_METADATA_BYTES = 4_096
MAX_METADATA_DEPTH = 32

Priority = Literal["high", "normal", "low"]


class JobRequest(BaseModel):
    """What one job is to do. Immutable.

    Raises:
        InvalidRequest: with one :class:`Fault` for each rule that a field breaks.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    task: ClassVar[str]
    """The name of the Celery task whose arguments these are."""

    tenant: str | None = Field(None, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    """On whose behalf. Tenants of one priority have fair shares."""
    model: str | None = Field(None, min_length=1, max_length=200)
    priority: Priority = "normal"
    deadline_s: float | None = Field(None, gt=0, le=LONGEST_DEADLINE_S)
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)
    metadata: dict[str, Any] | None = None

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            known = type(self).model_fields
            faults = [fault_of(each, known) for each in broken_rules(error)]
            raise InvalidRequest.from_faults(faults) from None

    @field_validator("metadata")
    @classmethod
    def _metadata_is_small_json(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return small_json(
            value, "metadata", most_levels=MAX_METADATA_DEPTH, most_bytes=MAX_METADATA_BYTES
        )

    def wire(self) -> dict[str, Any]:
        """The kwargs of the task: plain JSON without the defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, by_alias=True)

    def __repr__(self) -> str:
        # Requests end up in logs by accident, but prompts must not.
        return f"{type(self).__name__}({self.summary()})"

    __str__ = __repr__

    def summary(self) -> str:
        """The request without the user's text, for logs and events."""
        return summary_of(type(self), self.wire())


def request_digest(requests: Sequence[JobRequest]) -> str:
    """A digest of what ``requests`` name, which repetitions under one idempotency key must share;
    "" if they have no key.

    Neither the order of fields matters nor whether a number is written as 1 or 1.0, and the key
    itself is left out.
    """
    if all(request.idempotency_key is None for request in requests):
        return ""
    named = [
        request.model_dump(
            mode="json",
            include=request.model_fields_set - {"idempotency_key"},
            exclude_none=True,
            by_alias=True,
        )
        for request in requests
    ]
    named = json.loads(json.dumps(named), parse_float=_number)
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


_MODEL = re.compile(r"[A-Za-z0-9._/-]{1,200}")
"""Names of models, and nothing that could be a prompt."""


def summary_of(kind: type[JobRequest], fields: Mapping[str, Any]) -> str:
    """The ``fields`` of a request of this ``kind``, valid or not, in one line: numbers and the
    model's name as they are, otherwise sizes."""
    # The name of an unknown field comes from the user and may be private.
    known = [name for name in fields if name in kind.model_fields]
    model = fields.get("model")
    parts = []
    if isinstance(model, str) and _MODEL.fullmatch(model):
        # First, where Flower's list of tasks has room for it.
        parts.append(f"model={model}")
        known.remove("model")
    parts += [f"{name}={describe(fields[name])}" for name in known]
    unknown = len(fields) - len(known)
    return ", ".join([*parts, f"unknown fields: {unknown}"] if unknown else parts)
