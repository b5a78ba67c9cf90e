"""What the generated text must look like: JSON, a pattern, one of some texts, or a grammar."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.values import small_json

MAX_SCHEMA_BYTES = 262_144
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARS = 65_536
MAX_TEXTS = 1_024
MAX_TEXT_CHARS = 4_096
MAX_NAME_CHARS = 128
"""As Anthropic has it. Clients of several services join names to such lengths."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9_.-]+$")]


def _is_small_json(value: dict[str, Any]) -> dict[str, Any]:
    small_json(value, "schema", most_levels=MAX_SCHEMA_DEPTH, most_bytes=MAX_SCHEMA_BYTES)
    if not _has_short_numbers(value):
        # Grammars would round them, and so accept other numbers.
        raise PydanticCustomError(
            "schema", "whole numbers must be at least -2**63 and at most 2**64 - 1"
        )
    return value


def _has_short_numbers(value: object) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return all(map(_has_short_numbers, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _as_object(value: object) -> object:
    # vLLM takes a schema as a string too.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("schema", "must be a JSON Schema, or one as a string") from error


def as_tuple(value: object) -> object:
    """JSON has only lists, which strict mode refuses for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _not_empty(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise PydanticCustomError("too_short", "must have at least one item")
    return value


NOT_EMPTY = AfterValidator(_not_empty)
"""``min_length`` would count the valid items, and so report an invalid one twice; outside of
``| None`` it fails on None."""

JsonSchema = Annotated[dict[str, Any], AfterValidator(_is_small_json)]


class Part(BaseModel):
    """A part of a request, or a question."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NamedSchema(Part):
    """A JSON Schema as OpenAI's ``response_format`` names it."""

    name: Name = "response"
    schema_: JsonSchema = Field(alias="schema")
    description: str | None = Field(None, max_length=MAX_TEXT_CHARS)
    strict: bool | None = None
    """Accepted and without effect: a schema always holds."""


class ResponseFormat(Part):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _schema_of_an_object(cls, value: object) -> object:
        # llama.cpp, Together and others have the schema beside either type.
        match value:
            case {"type": "json_object" | "json_schema" as kind, "schema": schema, **rest}:
                if schema is None:
                    return {"type": kind, **rest}
                given = {name: each for name, each in rest.items() if each is not None}
                if given.keys() <= NamedSchema.model_fields.keys():
                    return {"type": "json_schema", "json_schema": {"schema": schema, **given}}
        return value

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "response_format", "json_schema must be given with type json_schema, and only then"
            )
        return self


class StructuredOutputs(Part):
    """vLLM's ``structured_outputs``: exactly one constraint."""

    json_: Annotated[JsonSchema | None, BeforeValidator(_as_object)] = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1, max_length=MAX_PATTERN_CHARS)
    choice: Annotated[
        Annotated[
            tuple[Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)], ...],
            Field(max_length=MAX_TEXTS),
            NOT_EMPTY,
        ]
        | None,
        BeforeValidator(as_tuple),
    ] = None
    grammar: str | None = Field(None, min_length=1, max_length=MAX_PATTERN_CHARS)
    """In llguidance's dialect of Lark, or in GBNF if a line begins with ``name ::=``."""
    strict: bool = False
    """Whether a schema is refused of which a grammar cannot hold all."""

    @model_validator(mode="after")
    def _one_constraint(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar]
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError(
                "structured_outputs", "exactly one of json, regex, choice and grammar must be given"
            )
        return self
