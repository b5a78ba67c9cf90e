"""Documents that any process of the fleet may have written, also one of another version."""

from __future__ import annotations

from typing import TypeVar

from kombu.log import get_logger
from pydantic import BaseModel, ValidationError

logger = get_logger(__name__)

Document = TypeVar("Document", bound=BaseModel)

_warned: set[type[BaseModel]] = set()


def read(kind: type[Document], text: str | bytes) -> Document | None:
    """None if it cannot be read: one odd entry must not hide all others. The first of each kind is
    logged, without its content."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        if kind not in _warned:
            _warned.add(kind)
            fields = sorted({str(fault["loc"][0]) for fault in error.errors() if fault["loc"]})
            logger.warning(
                "an entry in Redis is no readable %s (%s); all such entries are skipped",
                kind.__name__,
                ", ".join(fields) or "not JSON of its kind",
            )
        return None
