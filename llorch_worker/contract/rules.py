"""pydantic's rules in the words of JSON, which is what users send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic_core import ErrorDetails

from llorch_worker.misspelt import meant

_TYPES = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "none_required": "must be null",
}
"""Of Python's types by pydantic's name of the error."""
_BEGINNING = re.compile(r"^(Input|[A-Z][a-z]+) should (be|have) ")
_MOST_LOOKED_AT = 100


def rule_of(error: ErrorDetails | Mapping[str, Any]) -> str:
    """The rule that was broken, as a clause about the field: ``must be greater than 0``."""
    # A whole body that is missing has no name.
    if error["type"] == "missing" and error["loc"]:
        return _missing(str(error["loc"][-1]), error["input"])
    rule: str = error["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return _TYPES.get(error["type"]) or _BEGINNING.sub(r"must \2 ", rule)


def _missing(field: str, given: object) -> str:
    names = islice(given, _MOST_LOOKED_AT) if isinstance(given, Mapping) else ()
    slip = next((name for name in names if meant(str(name), [field])), None)
    return "Field required" if slip is None else f"Field required; did you mean it by {slip}?"
