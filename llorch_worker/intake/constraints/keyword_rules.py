"""Rules for arguments that are written as in Python: ``city="Bern", days=2``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "x-guidance", "$defs"),
        *("definitions", "$schema", "$id", "$comment", "title", "description", "examples"),
        *("default", "deprecated", "strict"),
    }
)
_SHARED = ("x-guidance", "$defs", "definitions")
"""What goes with the schema of each property, which is a grammar of its own."""


def is_plain(parameters: Mapping[str, Any]) -> bool:
    """Whether keywords can say all that the schema asks for. What else it may allow, such as keys
    without a name in it, needs an object in JSON."""
    properties = parameters.get("properties")
    if properties is None:
        return parameters.get("additionalProperties") is False
    return (
        parameters.keys() <= _PLAIN
        and all(name.isidentifier() for name in properties)
        and properties.keys() >= set(parameters.get("required", ()))
        and all(map(_stands_alone, properties.values()))
        and all(
            reference.startswith(("#/$defs/", "#/definitions/"))
            for reference in _references(parameters)
        )
    )


def _stands_alone(schema: Any) -> bool:
    """Whether what is shared does not change its meaning. A schema may also be true or false."""
    return not isinstance(schema, dict) or schema.keys().isdisjoint(_SHARED)


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        match left.pop():
            case dict() as each:
                if isinstance(reference := each.get("$ref"), str):
                    yield reference
                left += each.values()
            case list() as each:
                left += each


def keyword_rules(
    rule: str, parameters: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Lines in Lark that define ``rule``, each with the schema that it calls ``@`` its own name."""
    properties = [
        (name, {} if schema is True else schema)
        for name, schema in parameters.get("properties", {}).items()
        if schema is not False
    ]
    required = set(parameters.get("required", ()))
    shared = {key: parameters[key] for key in _SHARED if key in parameters}
    # Two rules a keyword: for the first that is written, and for one behind others.
    for number, (name, schema) in enumerate(properties):
        optional = name not in required
        for begun, sign in ((f"{rule}_{number}", ""), (f"{rule}_{number}_more", ", ")):
            skipped = f" | {rule}_{number + 1}{'_more' if sign else ''}" if optional else ""
            value = f"{rule}_value_{number}"
            spelt = json.dumps(f"{sign}{name}=")
            line = f"{begun}: {spelt} @{value} {rule}_{number + 1}_more{skipped}"
            yield line, (None if sign else {"name": value, "json_schema": {**shared, **schema}})
    for end in (f"{rule}_{len(properties)}", f"{rule}_{len(properties)}_more"):
        yield f'{end}: ""', None
    yield f"{rule}: {rule}_0", None
