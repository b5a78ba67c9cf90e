"""``/v1/messages`` with Anthropic's own package, over a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess

MODEL = "stories"
USER = {"role": "user", "content": "Tell me a story"}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [USER],
    "max_tokens": 16,
    "extra_body": {"temperature": 0},  # which the package does not know any more
}
GO = {
    "name": "go",
    "input_schema": {
        "type": "object",
        "properties": {"to": {"enum": ["park", "home"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
pytestmark = pytest.mark.lacks("needs the package anthropic", when=find_spec("anthropic") is None)


@pytest.fixture
def claude(talker: WorkerProcess, gateway: GatewayProcess) -> Iterator[Any]:
    """Anthropic's own client, over ``talker``."""
    from anthropic import Anthropic

    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_streamed_message_is_the_whole_one(claude: Any) -> None:
    whole = claude.messages.create(**ASK, system="Be brief")
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == 16
    with claude.messages.stream(**ASK, system=[{"type": "text", "text": "Be brief"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    usages = [message.usage for message in (whole, final)]
    prompts = [each.input_tokens + each.cache_read_input_tokens for each in usages]
    counted = claude.messages.count_tokens(model=MODEL, messages=[USER], system="Be brief")
    assert prompts == [counted.input_tokens] * 2


def test_a_stop_sequence_is_named(claude: Any) -> None:
    asked = {**ASK, "max_tokens": 100, "stop_sequences": ["|", "."]}
    whole = claude.messages.create(**asked)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", ".")
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ".")
    assert final.content[0].text == whole.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "go"}])
def test_a_tool_is_used_over_several_turns(claude: Any, choice: dict[str, Any]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    asked = {**ASK, "tools": [GO], "tool_choice": choice, "max_tokens": 60}
    turns = [USER]
    for stream in (False, True, False):
        if stream:
            with claude.messages.stream(**{**asked, "messages": turns}) as events:
                kinds = {event.type for event in events}
                answer = events.get_final_message()
            assert "input_json" in kinds
        else:
            answer = claude.messages.create(**{**asked, "messages": turns})
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert (call.type, call.name) == ("tool_use", "go")
        assert call.input["to"] in ("park", "home")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
        turns = [*turns, answer.to_param(), {"role": "user", "content": [result]}]
    last = claude.messages.create(
        **{**ASK, "messages": turns, "tools": [GO], "tool_choice": {"type": "none"}}
    )
    assert last.content[0].type == "text"


def test_errors_are_those_of_the_package(claude: Any) -> None:
    import anthropic

    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    with pytest.raises(anthropic.BadRequestError, match="image is not read") as refused:
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": [picture]}]})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.post("/v1/messages", body={"messages": [USER]}, cast_to=object)
    long = {**ASK, "messages": [{"role": "user", "content": "word " * 4_000}]}
    with pytest.raises(anthropic.BadRequestError), claude.messages.stream(**long):
        pass


def test_models_have_anthropics_shape_for_its_client(claude: Any) -> None:
    (model,) = claude.models.list()
    assert (model.type, model.id, model.lifecycle) == ("model", MODEL, "active")
    assert claude.models.retrieve(MODEL).created_at == model.created_at


def test_a_key_may_come_as_x_api_key(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    import anthropic

    key, entry = new_key("alice")
    (tmp_path / "keys.toml").write_text(entry)
    with running_gateway(redis_server.url, tmp_path, keys=tmp_path / "keys.toml") as gateway:
        for given in ({"api_key": key}, {"auth_token": key}):
            with anthropic.Anthropic(base_url=gateway.url, **given) as client:
                assert client.messages.create(**ASK).content
        with (
            anthropic.Anthropic(base_url=gateway.url, api_key="x") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(**ASK)
