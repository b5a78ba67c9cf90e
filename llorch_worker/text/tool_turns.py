"""Tools, calls and results as text of plain turns, for templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from llorch_worker.text.dialects import Dialect

Turn = dict[str, Any]
Place = Literal["tools", "calls", "several", "results", "system"]
"""What a template may have a place for; ``several``: calls in one turn."""


def plain_turns(
    turns: Sequence[Turn], tools: Sequence[Any], dialect: Dialect, places: Collection[Place]
) -> list[Turn]:
    """``turns`` as a template needs them that has only ``places``.

    Tools are listed in the system message, or before the first question; calls are the text that
    the model would write; a result is JSON in the user's turn. Where a turn has room for one call,
    each gets a turn of its own, with its result behind it.
    """
    if "calls" in places and "several" not in places:
        turns = _one_call_each(turns)
    names = {
        call["id"]: call["function"]["name"]
        for turn in turns
        for call in turn.get("tool_calls", ())
    }
    made: list[Turn] = []
    after_result = False
    for turn in turns:
        is_result = turn["role"] == "tool" and "results" not in places
        if is_result:
            name = turn.get("name") or names.get(turn.get("tool_call_id", ""), "")
            response = {"tool_response": {"tool": name, "content": turn["content"]}}
            turn = {"role": "user", "content": json.dumps(response, ensure_ascii=False)}
        elif turn.get("tool_calls") and "calls" not in places:
            turn = _with_calls(turn, dialect)
        if after_result and turn["role"] == "user":
            # Many templates want turns of user and assistant to alternate.
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{turn['content']}"}
        else:
            made.append(turn)
        after_result = is_result
    return made if not tools or "tools" in places else _with_tools(made, tools, dialect, places)


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    made: list[Turn] = []
    results: list[Turn] = []
    for turn in reversed(turns):
        calls = turn.get("tool_calls", ())
        if turn["role"] == "tool":
            results.insert(0, turn)
        elif len(calls) < 2:
            made += [*reversed(results), turn]
            results = []
        else:
            alone = []
            for number, call in enumerate(calls):
                said = {"role": turn["role"], "content": ""} if number else turn
                alone.append({**said, "tool_calls": [call]})
                answers = (n for n, r in enumerate(results) if r.get("tool_call_id") == call["id"])
                if (answer := next(answers, None)) is not None:
                    alone.append(results.pop(answer))
            made += reversed([*alone, *results])
            results = []
    return [*results, *reversed(made)]


def _with_calls(turn: Turn, dialect: Dialect) -> Turn:
    functions = [call["function"] for call in turn["tool_calls"]]
    written = dialect.write(
        (each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions
    )
    content = f"{turn['content']}\n{written}" if turn["content"] else written
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {
        "content": content
    }


def _with_tools(
    turns: list[Turn], tools: Sequence[Any], dialect: Dialect, places: Collection[Place]
) -> list[Turn]:
    first, last = ("user", True) if "system" not in places else ("system", False)
    at = next((i for i, turn in enumerate(turns) if turn["role"] == first), None)
    told = instructions(tools, dialect)
    if at is None:
        return [{"role": first, "content": told}, *turns]
    said = turns[at]["content"]
    told = f"{told}\n\n{said}" if last else f"{said}\n\n{told}".lstrip()
    return [*turns[:at], {**turns[at], "content": told}, *turns[at + 1 :]]


def instructions(tools: Sequence[Any], dialect: Dialect) -> str:
    """What tells a model of its tools that was not trained to use any."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = dialect.write([("FUNCTION", "ARGUMENTS")])
    return (
        f"You can call these functions:\n{listed}\n\n"
        f"To call functions, answer with nothing but JSON in this form: {form}\n"
        "ARGUMENTS is a JSON object that fits the parameters of FUNCTION. "
        "If no function helps, answer in plain text."
    )
