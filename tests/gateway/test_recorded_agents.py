"""The first three requests of coding agents, as ``benches.histories.agents`` wrote them down: a
question, and what two calls of tools gave. Codex 0.171.0, Claude Code 2.1.197."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.openai_types import check_item
from tests.gateway.talking import MODEL, events_of

RECORDED = Path(__file__).parent / "recorded"


def recorded(agent: str) -> list[dict[str, Any]]:
    lines = (RECORDED / f"{agent}.jsonl").read_text(encoding="utf-8").splitlines()
    requests: list[dict[str, Any]] = [json.loads(line) for line in lines]
    tools = requests[0]["body"]["tools"]
    return [{**each, "body": {"tools": tools, **each["body"], "model": MODEL}} for each in requests]


def sent(wire: httpx.Client, request: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {**request["body"], **fields}
    return wire.post(request["path"], headers=request["headers"], json=body)


@pytest.mark.parametrize("number", range(3))
def test_codex_is_understood(wire: httpx.Client, number: int) -> None:
    request = recorded("codex")[number]
    calls = [item for item in request["body"]["input"] if item["type"] == "function_call"]
    assert len(calls) == number
    answer = sent(wire, request, max_output_tokens=8)
    end = events_of(answer)[-1]
    assert end["type"] in ("response.completed", "response.incomplete")
    for item in end["response"]["output"]:
        check_item(item)
    ignored = answer.headers["x-llorch-ignored"].split(", ")
    assert ignored == ["reasoning.summary", "namespace", "web_search"]


@pytest.mark.parametrize("number", range(3))
def test_claude_code_is_understood(wire: httpx.Client, number: int) -> None:
    request = recorded("claude")[number]
    assert len(request["body"]["messages"]) == 2 + 2 * number
    # One tool's description is as long as this before it is cut.
    tool = {**request["body"]["tools"][0], "name": "Long", "description": "a" * 18_780}
    tools = [*request["body"]["tools"], tool]
    answer = sent(wire, request, max_tokens=8, tools=tools)
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert answer.headers["x-llorch-ignored"] == "context_management"
