"""The request fields that completions and chat have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ConfigDict, GetJsonSchemaHandler, SkipValidation
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from llorch_worker.contract import Fault, GenerationRequest, Priority, StructuredOutputs
from llorch_worker.contract.message import MAX_PROMPT_CHARS
from llorch_worker.contract.request import MAX_AFFINITY_KEY_CHARS
from llorch_worker.openai_api.shape import KeyedBody, Label, Shape
from llorch_worker.openai_api.spelling import Spelt


class StreamOptions(Spelt, Shape):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    """End the stream with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool = False
    """With include_usage: give the usage so far in every chunk."""


class Sampling(KeyedBody):
    """How to generate. Fields of :class:`GenerationRequest` have its ranges and its defaults, and
    are checked there, once; so is ``null``, which means the default."""

    model: SkipValidation[str | None] = None
    """By default the only one that is served."""
    temperature: SkipValidation[float | None] = None
    top_p: SkipValidation[float | None] = None
    n: SkipValidation[int | None] = None
    stop: SkipValidation[str | list[str] | None] = None
    seed: SkipValidation[int | None] = None
    presence_penalty: SkipValidation[float | None] = None
    frequency_penalty: SkipValidation[float | None] = None
    logit_bias: SkipValidation[dict[str, float] | None] = None
    """Token ids, as strings, to what is added to their logits."""

    top_k: SkipValidation[int | None] = None
    min_p: SkipValidation[float | None] = None
    repetition_penalty: SkipValidation[float | None] = None
    min_tokens: SkipValidation[int | None] = None
    ignore_eos: SkipValidation[bool | None] = None
    stop_token_ids: SkipValidation[list[int] | None] = None
    include_stop_str_in_output: SkipValidation[bool | None] = None
    skip_special_tokens: SkipValidation[bool | None] = None
    structured_outputs: SkipValidation[StructuredOutputs | None] = None
    """What the text must look like: exactly one of json, regex, choice and grammar."""
    grammar: Label | None = None
    """llama.cpp's name of ``structured_outputs.grammar``."""
    json_schema: SkipValidation[Any] = None
    """llama.cpp's name of ``structured_outputs.json``."""
    priority: SkipValidation[Priority | None] = None
    """By default that of the key, or normal."""
    deadline_s: SkipValidation[float | None] = None
    """Seconds from now. A text that is cut off by it has finish_reason "length", and "deadline" as
    llorch_finish_reason; without a token by then, the answer is a 504."""
    affinity_key: SkipValidation[str | None] = None
    """Requests with the same key go to the same worker if that makes none wait; by default those
    whose prompts begin alike."""
    speculation: SkipValidation[str | None] = None
    """"off": the worker guesses no tokens. The answer is the same."""
    prediction: Any = None
    """What the answer may say: text, or ``{"type": "content", "content": text or parts of text}``.
    Anything else says nothing, because a prediction changes no token."""
    prompt_cache_key: Label | None = None
    """OpenAI's name for ``affinity_key``."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With the ranges of the contract, which has the only copy."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name, rule in _contract_fields().items():
            if name in fields and _leaves_ranges_out(fields[name], rule):
                about = {key: rule[key] for key in ("title", "description") if key in rule}
                ranged = fields[name].get("anyOf", [])
                only = {} if ranged else _kinds(rule)[0]
                null = {"anyOf": [*_kinds(rule), _NULL]} if ranged else {}
                fields[name] = about | fields[name] | only | null
        return schema

    @property
    def ignored(self) -> Sequence[str]:
        """What of the request changes nothing, though it may have been meant to."""
        return self.unknown

    def refusals(self) -> list[Fault]:
        """Those that would change the answer, and names of one field that are given together."""
        shapes = self._shapes()
        if len(shapes) < 2:
            return super().refusals()
        rule, got = "at most one of them may shape the text", " and ".join(shapes)
        return [*super().refusals(), Fault(field=" | ".join(shapes), rule=rule, got=got)]

    def _shapes(self) -> dict[str, Any]:
        """``structured_outputs`` by each of its names that is given."""
        grammar = {"grammar": self.grammar} if self.grammar else None
        schema = None if self.json_schema is None else {"json": self.json_schema}
        named = {
            "structured_outputs": self.structured_outputs,
            "grammar": grammar,
            "json_schema": schema,
        }
        return {name: shape for name, shape in named.items() if shape is not None}

    def passed_on(self) -> dict[str, Any]:
        """The fields above that a :class:`GenerationRequest` has too; some may be None."""
        passed_on = {name: getattr(self, name) for name in _PASSED_ON}
        passed_on["prediction"] = _predicted(self.prediction)
        if self.stop == "":
            passed_on["stop"] = None
        shapes = self._shapes()
        if len(shapes) == 1:
            passed_on["structured_outputs"] = next(iter(shapes.values()))
        if self.affinity_key is None and self.prompt_cache_key:
            passed_on["affinity_key"] = self.prompt_cache_key[:MAX_AFFINITY_KEY_CHARS]
        return passed_on


_PASSED_ON = tuple(name for name in Sampling.model_fields if name in GenerationRequest.model_fields)


@cache
def _contract_fields() -> dict[str, dict[str, Any]]:
    """The schemas of the contract's fields, without those that refer to others."""
    fields = GenerationRequest.model_json_schema()["properties"]
    return {name: rule for name, rule in fields.items() if "$ref" not in json.dumps(rule)}


def _leaves_ranges_out(field: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Whether a body's field has the types of a contract's, and says no more of them."""
    own = _kinds(field)
    return all(kind.keys() <= _UNRANGED for kind in own) and (
        [kind["type"] for kind in own] == [kind.get("type") for kind in _kinds(rule)]
    )


def _kinds(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a value may be but null."""
    kinds = schema.get("anyOf") or [{k: v for k, v in schema.items() if k not in _ABOUT}]
    return [kind for kind in kinds if kind not in (_NULL, {})]


_ABOUT = ("title", "description", "default")
_UNRANGED = {"type", "items", "additionalProperties"}
_NULL = {"type": "null"}


def _predicted(prediction: Any) -> str | None:
    """The text of a prediction."""
    content = prediction.get("content") if isinstance(prediction, dict) else prediction
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))[:MAX_PROMPT_CHARS] or None
