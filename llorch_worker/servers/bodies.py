"""A request in the terms of each server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest, describe
from llorch_worker.contract.output_format import StructuredOutputs
from llorch_worker.intake.constraints.gbnf import is_gbnf
from llorch_worker.servers.fields import ALWAYS_SENT, Kind, faults, words_for

LAST_FIELDS: Final = (
    *("stop", "content", "tokens", "tokens_predicted", "tokens_evaluated", "stop_type"),
    *("stopping_word", "timings/cache_n"),
)
"""What llama-server tells at the end of an answer: all of it has the prompt, too."""
WRITTEN: Final = (
    *("messages", "tools", "response_format", "structured_outputs", "chat_template_kwargs"),
    *("stop", "prediction"),
)
SHORT_WORD: Final = 4
"""Characters that a word of a tool, a schema or a grammar needs to be told from an error's own."""
_SAMPLERS: Final = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""In the order of the contract, and none of which it knows nothing."""
_GOES_ON = Fault(
    field="messages",
    rule="must not end with an assistant's turn, in which llama-server would go on; "
    "continue_final_message asks for that",
    got="an assistant's turn",
)


@dataclass(frozen=True, slots=True)
class Served:
    """A model at a server."""

    kind: Kind
    model: str
    """As the server calls it."""
    max_context: int
    """0 if it does not say."""
    parses_chats: bool = False
    """Whether llama-server must read thoughts in answers, and then tells no ids."""


def check(request: GenerationRequest, served: Served) -> None:
    """Raises InvalidRequest with all that the server does not do."""
    found = [*faults(request, served.kind), *_shape_faults(request.structured_outputs, served.kind)]
    last = request.messages[-1] if request.messages else None
    if served.kind == "llama-server" and last is not None and last.role == "assistant":
        found += [] if request.continue_final_message else [_GOES_ON]
    if found:
        raise InvalidRequest.from_faults(found)


def is_native(request: GenerationRequest, served: Served) -> bool:
    """Whether llama-server's own API takes the request, which tells ids but reads no answers."""
    return served.kind == "llama-server" and not (
        request.messages and (request.may_call or served.parses_chats)
    )


def template_body(request: GenerationRequest) -> dict[str, Any]:
    """What a chat's prompt is made from."""
    chat = _document(request, ("messages", "tools", "tool_choice", "chat_template_kwargs"))
    return chat | {
        "add_generation_prompt": request.begins_answer,
        "continue_final_message": request.continue_final_message,
    }


def body_of(
    request: GenerationRequest,
    served: Served,
    *,
    seed: int,
    prompt: Sequence[int] | str | None,
    most_tokens: int | None,
    begun: int = 0,
) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask for an answer as a stream. ``prompt``: in place of the
    request's, ids or a text. ``most_tokens``: as many as still may follow it. ``begun``: the tokens
    of the answer that it ends with."""
    native = is_native(request, served)
    is_chat = prompt is None and request.messages is not None
    whole = _document(request, tuple(type(request).model_fields))
    body: dict[str, Any] = {"stream": True, "seed": seed}
    for name, word in words_for(served.kind):
        is_replaced = name == "messages" and prompt is not None
        if not word.startswith("=") or name not in whole or is_replaced:
            continue
        if name in ALWAYS_SENT or whole[name] != type(request).model_fields[name].default:
            body[word[1:] or name] = whole[name]
    if is_chat:
        if served.kind != "another server":
            body |= template_body(request)
    else:
        body["prompt"] = prompt or request.prompt or request.prompt_token_ids
    if served.kind == "llama-server":
        # It takes 32 bits, of which the last number asks for a random seed.
        body |= {"seed": seed % (2**32 - 1), "samplers": _SAMPLERS, "mirostat": 0}
        if served.max_context:
            body["repeat_last_n"] = served.max_context
    if served.kind in ("vLLM", "SGLang"):
        body |= {"top_k": request.top_k or -1, "return_token_ids": True}
        body["min_tokens"] = max(0, request.min_tokens - begun)
    if served.kind == "SGLang":
        body.pop("add_generation_prompt", None)
    if most_tokens is not None or (served.kind == "vLLM" and not is_chat):
        # Without the parameter, texts get 16 tokens at all servers but llama-server.
        body["n_predict" if native else "max_tokens"] = most_tokens
    body |= _shape(request, native=native, kind=served.kind)
    if native:
        body |= {"return_tokens": True, "response_fields": LAST_FIELDS}
        if request.logprobs is not None:
            body["n_probs"] = max(1, request.logprobs)
        return "/completion", body
    body |= {"model": served.model, "stream_options": {"include_usage": True}}
    return "/v1/chat/completions" if is_chat else "/v1/completions", body


def texts_of(request: GenerationRequest) -> Iterator[str]:
    """What an error must not quote: all that the sender has written."""
    yield from filter(None, (request.prompt, *(each.content for each in request.messages or ())))
    if request.prompt_token_ids:
        yield ", ".join(map(str, request.prompt_token_ids))
    others = _texts_in(_document(request, WRITTEN))
    yield from (text for text in others if len(text) >= SHORT_WORD)


def _texts_in(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts_in(each)
        case dict():
            for name, each in value.items():
                if name == "properties" and isinstance(each, dict):
                    yield from each
                if name == "arguments":
                    with suppress(ValueError, RecursionError):
                        yield from _texts_in(json.loads(each))
                if name not in ("type", "role"):
                    yield from _texts_in(each)


def _document(request: GenerationRequest, names: Sequence[str]) -> dict[str, Any]:
    document = request.model_dump(mode="json", include=set(names), by_alias=True, exclude_none=True)
    return {name: value for name, value in document.items() if value not in ([], {})}


def _shape(request: GenerationRequest, *, native: bool, kind: Kind) -> dict[str, Any]:
    """What the text must look like."""
    asked, wanted = request.response_format, request.structured_outputs
    if asked is not None and asked.type != "text":
        if not native:
            return {"response_format": _document(request, ("response_format",))["response_format"]}
        return {"json_schema": asked.json_schema.schema_ if asked.json_schema else {}}
    if wanted is None:
        return {}
    if kind == "vLLM":
        return _document(request, ("structured_outputs",))
    if kind == "SGLang":
        if wanted.json_ is not None:
            named = {"name": "response", "schema": wanted.json_}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        if wanted.choice is not None:
            return {"regex": "|".join(f"({re.escape(text)})" for text in wanted.choice)}
        return {"ebnf": wanted.grammar} if wanted.grammar else {"regex": wanted.regex}
    if wanted.json_ is not None:
        return {"json_schema": wanted.json_}
    texts = " | ".join(_quoted(text) for text in wanted.choice or ())
    return {"grammar": wanted.grammar or f"root ::= {texts}"}


def _quoted(text: str) -> str:
    """A text in GBNF."""
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    return (
        f"\\U{ord(character):08X}"
        if character in '"\\' or not character.isprintable()
        else character
    )


def _shape_faults(wanted: StructuredOutputs | None, kind: Kind) -> Iterator[Fault]:
    if wanted is None:
        return
    if wanted.strict:
        rule = f"cannot be true: {kind} does not say what of a schema its grammar holds"
        yield Fault(field="structured_outputs.strict", rule=rule, got="true")
    if wanted.regex is not None and kind == "llama-server":
        rule = "is not done by llama-server; send a grammar"
        yield Fault(field="structured_outputs.regex", rule=rule, got=describe(wanted.regex))
    if wanted.grammar is not None and kind != "vLLM" and not is_gbnf(wanted.grammar):
        rule = f"must be {'GBNF' if kind == 'llama-server' else 'EBNF'} for {kind}"
        yield Fault(field="structured_outputs.grammar", rule=rule, got=describe(wanted.grammar))
