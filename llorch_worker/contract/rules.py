"""pydantic's rules in the words of JSON, which is what users send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_TYPES = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "none_required": "must be null",
}
"""Of Python's types by pydantic's name of the error."""
_BEGINNING = re.compile(r"^(Input|[A-Z][a-z]+) should (be|have) ")


def rule_of(error: ErrorDetails | Mapping[str, Any]) -> str:
    """The rule that was broken, as a clause about the field: ``must be greater than 0``."""
    rule: str = error["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return _TYPES.get(error["type"]) or _BEGINNING.sub(r"must \2 ", rule)
