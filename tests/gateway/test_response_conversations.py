"""Responses that are kept: conversations that go on, whose they are, and for how long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import openresponses_types
import pytest
from openai import OpenAI
from websockets.sync.client import connect as connect_socket

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.openai_api.responses_items import SUMMARY, unsealed
from tests.gateway.openai_types import check_item
from tests.gateway.talking import (
    ASK,
    MODEL,
    PATH,
    TOOL,
    refused,
)
from tests.gateways import running_gateway
from tests.services import RedisServer, WorkerProcess, wait_until

SOCKET_ENDS = ("response.completed", "error")


def test_a_conversation_goes_on_as_if_it_were_sent_whole(api: OpenAI) -> None:
    first = api.responses.create(**ASK, instructions="Be kind.")
    more = [{"role": "user", "content": "And then?"}]
    second = api.responses.create(
        **{**ASK, "input": more}, previous_response_id=first.id, instructions="Be brief."
    )
    whole = [{"role": "user", "content": ASK["input"]}, *first.output, *more]
    again = api.responses.create(**{**ASK, "input": whole}, instructions="Be brief.")
    assert second.output_text == again.output_text
    # The instructions of the first turn would make it longer.
    assert second.usage.input_tokens == again.usage.input_tokens
    third = api.responses.create(**{**ASK, "input": "So?"}, previous_response_id=second.id)
    items = api.responses.input_items.list(third.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    assert [items[1], items[3]] == [first.output[0], second.output[0]]


def test_items_are_referred_to_by_their_ids(api: OpenAI) -> None:
    first = api.responses.create(**ASK)
    (mine,) = api.responses.input_items.list(first.id).data
    more = {"role": "user", "content": "And then?"}
    references = [{"type": "item_reference", "id": mine.id}, {"id": first.output[0].id}]
    second = api.responses.create(**{**ASK, "input": [*references, more]})
    again = api.responses.create(**{**ASK, "input": [more]}, previous_response_id=first.id)
    assert second.output_text == again.output_text
    assert second.usage.input_tokens == again.usage.input_tokens
    kept = api.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in kept[:2]] == [mine.id, first.output[0].id]


@pytest.mark.parametrize("wrong", ["msg_x", "msg_1_0", "resp_", "rs_"])
def test_an_item_that_is_not_kept_is_named(api: OpenAI, wrong: str) -> None:
    reference = {"type": "item_reference", "id": wrong}
    error = refused(lambda: api.responses.create(**{**ASK, "input": [reference]}), 404)
    assert error["param"] == "input.0.id"
    gone = api.responses.create(**ASK, store=False).output
    refused(lambda: api.responses.create(**{**ASK, "input": [{"id": gone[0].id}]}), 404)


def test_the_oldest_turns_make_room_if_the_request_says_so(api: OpenAI) -> None:
    turn = {"role": "user", "content": "Lily went to the park. " * 10}
    answer = {"role": "assistant", "content": "She did. " * 10}
    system = {"role": "system", "content": "Be kind."}
    long = [system, *[turn, answer] * 20, {"role": "user", "content": "And then?"}]
    refused(lambda: api.responses.create(**{**ASK, "input": long}))
    response = api.responses.create(**{**ASK, "input": long}, truncation="auto")
    assert response.truncation == "auto"
    used = response.usage.input_tokens

    def of(turns: int) -> int:
        kept = [system, *long[-1 - 2 * turns :]]
        return api.responses.create(**{**ASK, "input": kept}).usage.input_tokens

    kept = next(n for n in range(20) if of(n) == used)
    error = refused(lambda: of(kept + 1))
    assert error["llorch_code"] == "CONTEXT_LENGTH_EXCEEDED"
    whole = api.responses.input_items.list(response.id, order="asc", limit=100).data
    assert len(whole) == len(long)
    alone = {"role": "user", "content": "Lily went to the park. " * 200}
    refused(lambda: api.responses.create(**{**ASK, "input": [alone]}, truncation="auto"))


def test_a_conversation_goes_on_only_while_a_body_could_hold_it(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    """A thought becomes no turn, so that neither their number nor the context bounds it."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 15_000}]}
    turn = {**ASK, "input": [thought, {"role": "user", "content": "Hi"}], "max_output_tokens": 1}
    rule = "at most 20000 bytes"
    with (
        running_gateway(redis_server.url, tmp_path, max_body_bytes=20_000) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        first = http.post(PATH, json=turn).json()["id"]
        second = http.post(PATH, json=turn | {"previous_response_id": first}).json()["id"]
        third = http.post(PATH, json=turn | {"previous_response_id": second})
        assert third.status_code == 400
        assert third.json()["error"]["param"] == "previous_response_id"
        assert rule in third.text
        reference = {"type": "item_reference", "id": f"rs_{first.removeprefix('resp_')}_0"}
        twice = http.post(PATH, json=turn | {"input": [reference, reference]})
        assert twice.json()["error"]["param"] == "input.1.id"
        assert rule in twice.text
        with connect_socket(f"{gateway.url.replace('http', 'ws')}{PATH}") as line:
            message = {"type": "response.create", "generate": False, **turn}
            ends = []
            for _ in range(3):
                line.send(json.dumps(message))
                while (event := json.loads(line.recv(60)))["type"] not in SOCKET_ENDS:
                    pass
                ends.append(event["type"])
                message["previous_response_id"] = event.get("response", {}).get("id")
            assert ends == ["response.completed", "response.completed", "error"]
            assert rule in event["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_prompt_is_counted_before_it_is_sent(api: OpenAI, choice: str) -> None:
    first = api.responses.create(**ASK)
    fields: dict[str, Any] = {"model": MODEL, "input": "And then?", "tools": [TOOL]}
    fields["tool_choice"] = choice
    fields |= {"previous_response_id": first.id, "instructions": "Be kind."}
    counted = api.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    answered = api.responses.create(**ASK | fields)
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens
    refused(lambda: api.responses.input_tokens.count(model=MODEL))


def test_a_compacted_conversation_goes_on(api: OpenAI, wire: httpx.Client) -> None:
    first = api.responses.create(**ASK)
    fields = {"model": MODEL, "previous_response_id": first.id, "input": "And then?"}
    document = wire.post(f"{PATH}/compact", json={**fields, "max_output_tokens": 8}).json()
    openresponses_types.CompactResource.model_validate(document)
    assert document["usage"]["output_tokens"] == 8
    *spoken, rest = document["output"]
    assert [item["content"][0]["text"] for item in spoken] == [ASK["input"], "And then?"]
    assert (rest["type"], len({item["id"] for item in document["output"]})) == ("compaction", 3)
    for item in document["output"]:
        check_item(item)
    more = {"role": "user", "content": "So?"}
    second = api.responses.create(**{**ASK, "input": [*document["output"], more]})
    summary = {"role": "assistant", "content": f"{SUMMARY}{unsealed(rest['encrypted_content'])}"}
    again = api.responses.create(**{**ASK, "input": [*spoken, summary, more]})
    assert second.output_text == again.output_text
    assert second.usage.input_tokens == again.usage.input_tokens
    third = api.responses.create(**{**ASK, "input": "Why?"}, previous_response_id=second.id)
    kept = api.responses.input_items.list(third.id, order="asc").data
    assert "compaction" in [item.type for item in kept]
    assert api.responses.compact(**fields).object == "response.compaction"
    refused(lambda: api.responses.retrieve(document["id"]), 404)


def test_a_summary_is_made_anew_and_waited_for(api: OpenAI, wire: httpx.Client) -> None:
    key = {"idempotency_key": "summary"}
    earlier = api.responses.create(**ASK, extra_body=key).output_text
    fields: dict[str, Any] = {**ASK, **key, "max_output_tokens": 5, "stream": True}
    fields |= {"background": True, "callback_url": "http://127.0.0.1:9/"}
    document = wire.post(f"{PATH}/compact", json=fields).json()
    assert document["usage"]["output_tokens"] == 5
    assert unsealed(document["output"][-1]["encrypted_content"]) != earlier


def test_another_request_with_the_same_idempotency_key_leaves_no_response(
    api: OpenAI, wire: httpx.Client, redis_server: RedisServer
) -> None:
    key = {"idempotency_key": "one response"}
    first = api.responses.create(**ASK, extra_body=key)
    with connect(redis_server.url) as store:
        kept = store.keys(keys.response("*"))
        answer = wire.post(PATH, json={**ASK, **key, "input": "Another."})
        assert answer.status_code == 409
        assert store.keys(keys.response("*")) == kept
    assert api.responses.create(**ASK, extra_body=key).id == first.id


def test_input_items_come_in_pages(api: OpenAI) -> None:
    turns = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "user")]
    response = api.responses.create(**{**ASK, "input": turns})
    pages = api.responses.input_items.list(response.id, order="asc", limit=3)
    assert [len(page.data) for page in pages.iter_pages()] == [3, 1]
    ids = [item.id for item in pages]
    assert ids == [item.id for item in api.responses.input_items.list(response.id)][::-1]
    assert len(set(ids)) == 4


def test_items_have_every_field_of_openai(api: OpenAI, wire: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "c", "output": "there"}
    first = {"role": "user", "content": "Go", "status": None}
    said = {"role": "assistant", "content": "Yes", "phase": "final_answer"}
    whole = [first, call, done, said, first]
    answer = wire.post(PATH, json={**ASK, "input": whole}).json()
    page = wire.get(f"{PATH}/{answer['id']}/input_items", params={"order": "asc"}).json()
    items = page.pop("data")
    assert [check_item(item).type for item in items] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert items[3]["phase"] == "final_answer"
    assert page.keys() == {"object", "first_id", "last_id", "has_more"}
    wrong = wire.get(f"{PATH}/{answer['id']}/input_items", params={"after": "msg_x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


def test_a_response_that_is_not_stored_is_gone(api: OpenAI, redis_server: RedisServer) -> None:
    with connect(redis_server.url) as redis:
        before = set(redis.scan_iter(keys.response("", "*")))
        response = api.responses.create(**ASK, store=False)
        assert set(redis.scan_iter(keys.response("", "*"))) == before
    refused(lambda: api.responses.retrieve(response.id), 404)
    error = refused(lambda: api.responses.create(**ASK, previous_response_id=response.id))
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_a_deleted_response_is_gone(api: OpenAI) -> None:
    response = api.responses.create(**ASK)
    api.responses.delete(response.id)
    refused(lambda: api.responses.retrieve(response.id), 404)
    refused(lambda: api.responses.delete(response.id), 404)


def test_responses_are_kept_for_a_stated_time(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        running_gateway(redis_server.url, tmp_path, response_ttl_s=1) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api,
    ):
        response = api.responses.create(**ASK)

        def gone() -> bool:
            try:
                return not api.responses.retrieve(response.id)
            except openai.NotFoundError:
                return True

        wait_until(gone)
        with connect(redis_server.url) as redis:
            assert not redis.exists(keys.response("", response.id.removeprefix("resp_")))


def test_a_response_is_stored_though_the_first_with_its_key_was_not(api: OpenAI) -> None:
    first, second = (
        api.responses.create(**ASK, store=store, extra_headers={"Idempotency-Key": "stored"})
        for store in (False, True)
    )
    assert first.id == second.id
    assert api.responses.retrieve(second.id).output == first.output
