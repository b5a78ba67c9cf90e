"""Random histories of chats, in a form that no client has: each makes its own messages of it.

A history is JSON: ``turns``, ``tools`` (OpenAI's functions) and ``choice``, the tool choice of its
next answer. A turn has a ``role``, ``texts``, ``parts`` (whether they are sent as such), and
``name``, maybe null. An assistant's also has ``thought``, ``refusal`` and ``calls``; a tool's the
``call`` that it answers and whether that ``failed``.
"""

from __future__ import annotations

import json
import random
from typing import Any

JsonObject = dict[str, Any]

TEXTS = (
    "", " ", "\n\n", "Hi", "The weather in Paris?", "Grüße aus Köln 🌦️", "你好，世界", "שלום",
    "a\u0000b", '{"city": "Paris"}', "<|im_end|>\n<|im_start|>system", "<think>hm</think>",
    "<tool_call>", "{{ messages }} {% raw %}", "```python\nprint(1)\n```", "[INST] x [/INST]",
    "\u2028\ufeff", "word " * 60,
)  # fmt: skip
OBJECTS = (
    "{}",
    '{"city": "Paris"}',
    '{"city": "Köln 🌦️", "days": [1, null, 2.5], "deep": {"a": {}}}',
)
NO_OBJECTS = ("", "null", "[1]", '"text"', '{"city": "Pa', "{'city': 'Paris'}", "Paris")
NAMES = ("ann", "Bob_2", "agent-3")
FUNCTIONS = ("weather", "noop", "search")
PARAMETERS: dict[str, JsonObject] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "noop": {"type": "object", "properties": {}},
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "minLength": 1},
            "days": {"type": "array", "items": {"type": "integer"}},
            "kind": {"anyOf": [{"enum": ["news", "web"]}, {"type": "null"}]},
        },
    },
}


def history(seed: int) -> JsonObject:
    """The same one for a seed. Every call has its result right behind it."""
    draw = random.Random(seed)
    turns: list[JsonObject] = []
    if draw.random() < 0.6:
        turns.append(_said(draw, draw.choice(("system", "system", "developer"))))
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        turns.append(_said(draw, "user"))
        if draw.random() < 0.1:
            turns.append(_said(draw, "user"))  # of another speaker
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            turns += _calls(draw)
        if draw.random() < 0.7:
            turns.append(_answer(draw))
        if draw.random() < 0.05:
            turns.append(_said(draw, "system"))
    if draw.random() < 0.7:
        turns.append(_said(draw, "user"))
    offered = draw.sample(FUNCTIONS, draw.randrange(len(FUNCTIONS) + 1))
    # A client offers no tools, or not those of earlier turns.
    tools = [
        {"type": "function", "function": {"name": n, "description": n, "parameters": PARAMETERS[n]}}
        for n in offered
    ]
    choice = draw.choice(("auto", "required", "none")) if tools and draw.random() < 0.5 else None
    return {"seed": seed, "turns": turns, "tools": tools, "choice": choice}


def _said(draw: random.Random, role: str) -> JsonObject:
    texts = [draw.choice(TEXTS) for _ in range(draw.choice((1, 1, 2, 3)))]
    name = draw.choice(NAMES) if draw.random() < 0.2 else None
    return {"role": role, "texts": texts, "parts": draw.random() < 0.4, "name": name}


def _answer(draw: random.Random) -> JsonObject:
    turn = _said(draw, "assistant") | {"thought": None, "refusal": None, "calls": []}
    if draw.random() < 0.3:
        turn["thought"] = draw.choice(TEXTS)
    if draw.random() < 0.1:
        turn |= {"texts": [], "refusal": draw.choice(("No.", "Nein 🙅"))}
    return turn


def _calls(draw: random.Random) -> list[JsonObject]:
    turn = _answer(draw) | {"refusal": None}
    if draw.random() < 0.6:
        turn["texts"] = []
    spellings = OBJECTS if draw.random() < 0.7 else NO_OBJECTS
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        id_ = draw.choice(("call_", "toolu_01", "chatcmpl-tool-", "")) + f"{draw.getrandbits(64):x}"
        function = {"name": draw.choice(FUNCTIONS), "arguments": draw.choice(spellings)}
        turn["calls"].append({"id": id_, **function})
    results = [
        _said(draw, "tool") | {"name": None, "call": call, "failed": draw.random() < 0.2}
        for call in turn["calls"]
    ]
    return [turn, *results]


def content_of(turn: JsonObject, kind: str = "text") -> str | list[JsonObject]:
    """The texts of a turn as OpenAI's API has them: one text, or parts."""
    if turn["parts"]:
        return [{"type": kind, "text": text} for text in turn["texts"]]
    return text_of(turn)


def text_of(turn: JsonObject) -> str:
    """The texts of a turn as one."""
    return "\n".join(turn["texts"])


def object_of(arguments: str) -> JsonObject:
    """The arguments of a call, for clients that keep only objects; empty if they are none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
