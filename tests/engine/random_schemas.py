"""JSON Schemas of many features, drawn at random, that short texts can fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ["id", "name", "a b", "größe", 'quo"te', "x", "y", "items", "type", "$odd", "日本"]
PATTERNS = ["^[a-f]{2,4}$", "^(yes|no)$", r"^\d{1,3}-[A-Z]{2}$", "^[^a-z]{1,3}$", "^a?b*c$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
DEEPEST = 3


def random_schema(seed: int) -> Schema:
    """Each seed gives another schema; about a fifth of them refer to definitions."""
    chance = random.Random(seed)
    schema = _object(chance, 0) if chance.random() < 0.6 else _any(chance, 0)
    if chance.random() < 0.2:
        node = {
            "type": "object",
            "properties": {"value": _scalar(chance), "next": {"$ref": "#/$defs/end"}},
            "required": ["value"],
            "additionalProperties": False,
        }
        end = {"anyOf": [{"type": "null"}, _scalar(chance)]}
        schema = {"$ref": "#/$defs/node", "$defs": {"node": node, "end": end}}
    return schema


def _any(chance: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [lambda c, _: _scalar(c)]
    if depth < DEEPEST:
        kinds += [_object, _array, _tuple, _one_of_several, _all_of]
    return chance.choice(kinds)(chance, depth)


def _scalar(chance: random.Random) -> Schema:
    low = chance.randint(-50, 50)
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randint(0, 8)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": chance.choice(PATTERNS)},
            {"type": "string", "format": chance.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "integer", "minimum": 0, "maximum": 10_000, "multipleOf": 7},
            {"type": "number", "minimum": low, "maximum": low + 0.5},
            {"type": ["boolean", "null"]},
            {"enum": [1, "two", None, True, [3], {"four": 4}]},
            {"const": chance.choice([0, "const", 'a "b"\n\\c', {"deep": [None]}, [], "日本"])},
        ]
    )


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(NAMES, chance.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
    }
    match chance.randrange(4):
        case 0:
            schema["additionalProperties"] = _scalar(chance)
            schema["maxProperties"] = len(names) + 1
        case 1:
            schema["patternProperties"] = {"^p[0-9]$": _scalar(chance)}
            schema["additionalProperties"] = False
        case _:
            schema["additionalProperties"] = False
    return schema


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    most = least + chance.randint(0, 2)
    return {"type": "array", "items": _any(chance, depth + 1), "minItems": least, "maxItems": most}


def _tuple(chance: random.Random, depth: int) -> Schema:
    first = [_any(chance, depth + 1) for _ in range(chance.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _one_of_several(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.5:
        return {"anyOf": [_any(chance, depth + 1) for _ in range(chance.randint(1, 3))]}
    kinds = [{"kind": {"const": name}, "value": _scalar(chance)} for name in ("one", "other")]
    required = {"type": "object", "required": ["kind", "value"], "additionalProperties": False}
    return {"oneOf": [{**required, "properties": properties} for properties in kinds]}


def _all_of(chance: random.Random, depth: int) -> Schema:
    low = chance.randint(0, 20)
    parts = [{"type": "integer", "minimum": low}, {"maximum": low + chance.randint(0, 30)}]
    return (
        {"allOf": parts}
        if depth
        else {
            "type": "object",
            "properties": {"n": {"allOf": parts}},
            "required": ["n"],
            "additionalProperties": False,
        }
    )
