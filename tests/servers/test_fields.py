"""What becomes of each field of a request at each server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.servers.bodies import Served, body_of, check
from llorch_worker.servers.fields import FIELDS, KINDS, Kind, refuses, words_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "SERVERS.md"
VALUES: dict[str, Any] = {
    "min_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    "logit_bias": {5: -1.0}, "seed": 11, "stop": ("x",), "include_stop_str_in_output": True,
    "skip_special_tokens": False, "stop_token_ids": (5,), "ignore_eos": True, "n": 2,
    "logprobs": 2, "prompt_logprobs": 1, "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a", 'b"']}, "add_special_tokens": False,
    "parse_special": False, "max_tokens": 9, "prediction": "x", "speculation": "off",
}  # fmt: skip
OF_CHATS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "none", "parallel_tool_calls": False, "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False,
}  # fmt: skip
"""Values that are not the defaults."""


def request(name: str) -> GenerationRequest:
    if name not in OF_CHATS:
        return GenerationRequest(prompt="one", **{name: VALUES[name]})
    messages = [{"role": "user", "content": "one"}]
    tools = {"tools": OF_CHATS["tools"]} if name in ("tool_choice", "parallel_tool_calls") else {}
    return GenerationRequest(messages=messages, **(tools | {name: OF_CHATS[name]}))


def how(word: str) -> str:
    return "sent" if word.startswith("=") else word


def table() -> str:
    """The fields as the page has them. Those that all servers get alike share a line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, row in FIELDS.items():
        said = tuple("false is refused" if how(word) == "true" else how(word) for word in row)
        rows.setdefault(said, []).append(f"`{name}`")
    lines = [f"| field | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(lines)


def test_each_field_of_a_request_has_a_place_at_each_server() -> None:
    assert set(FIELDS) == set(GenerationRequest.model_fields)
    assert {len(row) for row in FIELDS.values()} == {len(KINDS)}
    hows = {"sent", "here", "idle", "refused", "true"}
    assert {how(word) for row in FIELDS.values() for word in row} == hows


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_is_sent_or_refused_by_name_and_none_is_dropped(kind: Kind) -> None:
    served = Served(kind, "m", 4096, parses_chats=True)
    asked = VALUES | OF_CHATS
    plain = {
        name: body_of(base, served, seed=1, prompt=None, most_tokens=base.max_tokens)[1]
        for name in asked
        for base in [
            request(name).model_copy(update={name: GenerationRequest.model_fields[name].default})
        ]
    }
    for name, word in words_for(kind):
        if name not in asked:
            continue
        given = request(name)
        if refuses(word, getattr(given, name)):
            with pytest.raises(InvalidRequest, match=f"{name}: is not done by {kind}"):
                check(given, served)
            continue
        check(given, served)
        seed = given.seed or 1
        _, body = body_of(given, served, seed=seed, prompt=None, most_tokens=given.max_tokens)
        if word.startswith("="):
            parameter = word[1:] or name
            assert body[parameter] != plain[name].get(parameter), name
        elif word == "sent" and name != "add_special_tokens" and name != "parse_special":
            assert body != plain[name], name
        elif word in ("here", "idle"):
            assert body == plain[name], name


def test_llama_server_samples_in_the_order_of_the_contract() -> None:
    """top_p takes its share of what the rules before it have left."""
    served = Served("llama-server", "m", 4096)
    _, body = body_of(request("min_p"), served, seed=1, prompt=None, most_tokens=9)
    assert body["samplers"] == ("penalties", "temperature", "min_p", "top_k", "top_p")


def test_the_docs_have_the_table_of_the_code() -> None:
    assert table() in PAGE.read_text()
