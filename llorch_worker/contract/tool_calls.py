"""Calls of tools in a generated text, as Llama 3.x and Qwen write them.

A call is ``{"name": ..., "parameters": {...}}``, or ``arguments`` for ``parameters``. In Llama's
dialect "<|python_tag|>" may precede it, and several calls are separated by ";" or are the items of
a list. In Qwen's, which Hermes has, too, each stands between "<tool_call>" and "</tool_call>". A
text is calls as a whole or not at all.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

from llorch_worker.contract.request import GenerationRequest
from llorch_worker.contract.tools import FunctionCall, ToolCall

_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_LONGEST_BEGINNING = 300
"""Characters, with some white space; a name has 64 at most."""


def may_be_calls(text: str, request: GenerationRequest) -> bool:
    """Whether an answer that begins with ``text`` may be calls.

    A reader holds such text back until the answer ends; once False, all further text is text.
    """
    if not request.tools or request.tool_choice == "none" or request.shapes_text:
        return False
    text = text.lstrip()
    if any(len(text) < len(tag) and tag.startswith(text) for tag in (_TAG, _OPEN)):
        return True
    brackets = ("",) if text.startswith(_OPEN) else ("", "[")
    begun = text.removeprefix(_TAG).removeprefix(_OPEN)[:_LONGEST_BEGINNING]
    begun = "".join(begun.split())
    beginnings = [
        f'{bracket}{{{kind}"name":"{tool.function.name}"'
        for tool in request.tools
        for bracket in brackets
        for kind in ("", '"type":"function",')
    ]
    return any(each.startswith(begun) or begun.startswith(each) for each in beginnings)


def tool_calls(
    text: str, request: GenerationRequest, *, job_id: str, choice: int
) -> tuple[ToolCall, ...] | None:
    """The calls that the whole ``text`` of a choice is, or None if it is text.

    Their ids are the same in every attempt of the job.
    """
    if not may_be_calls(text, request):
        return None
    try:
        calls = _read_calls(text.strip().removeprefix(_TAG))
    except (ValueError, KeyError, RecursionError):
        return None
    if not {call.name for call in calls} <= {tool.function.name for tool in request.tools}:
        return None
    if not request.parallel_tool_calls:
        calls = calls[:1]
    return tuple(
        ToolCall(id=_call_id(job_id, choice, index), function=call)
        for index, call in enumerate(calls)
    )


def _call_id(job_id: str, choice: int, index: int) -> str:
    place = f"{job_id}/{choice}/{index}".encode(errors="surrogatepass")
    return f"call_{blake2b(place, digest_size=12).hexdigest()}"


def _read_calls(text: str) -> list[FunctionCall]:
    """Raises ValueError or KeyError if ``text`` is not calls."""
    if text.startswith(_OPEN):
        return _read_tagged(text)
    listed = text.lstrip().startswith("[")
    at = _after("[", text, 0) if listed else 0
    calls = []
    while True:
        call, at = _read_call(text, at)
        calls.append(call)
        if at == len(text) and not listed:
            return calls
        if listed and text[at : at + 1] == "]":
            break
        at = _after("," if listed else ";", text, at)
    if _after("]", text, at) < len(text):
        raise ValueError("text follows the list")
    return calls


def _read_tagged(text: str) -> list[FunctionCall]:
    """Calls in Qwen's dialect; see ``_read_calls``."""
    calls, at = [], 0
    while at < len(text):
        call, at = _read_call(text, _after(_OPEN, text, at))
        at = _after(_CLOSE, text, at)
        calls.append(call)
    return calls


def _read_call(text: str, at: int) -> tuple[FunctionCall, int]:
    """The call at ``at``, and where the next text begins."""
    at = _after("{", text, at)
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    while True:
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key must be a string")
        start = _after(":", text, at)
        values[key], at = _DECODER.raw_decode(text, start)
        spellings[key] = text[start:at]
        at = _skip_space(text, at)
        if text[at : at + 1] != ",":
            break
        at = _after(",", text, at)
    name = values.pop("name")
    arguments = "parameters" if "parameters" in values else "arguments"
    if not isinstance(values.pop(arguments), dict) or values.pop("type", "function") != "function":
        raise ValueError("not a call")
    if values:
        raise ValueError("more than a call")
    return FunctionCall(name=name, arguments=spellings[arguments]), _after("}", text, at)


def _after(expected: str, text: str, at: int) -> int:
    """Where the text after ``expected`` begins, which may have white space on both sides."""
    at = _skip_space(text, at)
    if not text.startswith(expected, at):
        raise ValueError(f"no {expected}")
    return _skip_space(text, at + len(expected))


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
