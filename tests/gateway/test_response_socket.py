"""``/v1/responses`` as a WebSocket, through the ``openai`` package and on the wire."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openresponses_types
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.frames import Close, Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect as connect_redis
from llorch_worker.client import Client
from llorch_worker.gateway.keys import new_key
from llorch_worker.gateway.sockets import MOST_SMALL_FRAMES, SMALL_FRAME_BYTES
from tests.gateway.openai_types import check_event
from tests.gateway.talking import ASK, PATH, TEXT_EVENTS, kinds
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.telemetry.scraping import scrape

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
CREATE = {"type": "response.create", **ASK}


def address(gateway: GatewayProcess) -> str:
    return gateway.url.replace("http://", "ws://") + PATH


@pytest.fixture
def line(talker: WorkerProcess, gateway: GatewayProcess) -> Iterator[ClientConnection]:
    with connect(address(gateway)) as connection:
        yield connection


def asked(line: ClientConnection, message: object) -> list[dict[str, Any]]:
    """The events up to the end of what ``message`` asks for."""
    line.send(message if isinstance(message, str) else json.dumps(message))
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(line.recv(30)))
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if "delta" in event)


def test_a_response_has_the_events_of_a_stream(line: ClientConnection, api: OpenAI) -> None:
    events = asked(line, CREATE)
    for event in events:
        check_event(event)
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert api.responses.retrieve(events[-1]["response"]["id"]).output_text == text_of(events)
    assert text_of(asked(line, CREATE)) == text_of(events)


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
def test_openais_client_talks_to_it(api: OpenAI) -> None:
    with api.responses.connect() as connection:
        connection.response.create(**ASK)
        for event in connection:
            if event.type == "response.incomplete":
                break
        assert event.response.output_text


def test_the_last_conversation_goes_on_though_nothing_is_stored(
    line: ClientConnection, redis_server: RedisServer, api: OpenAI
) -> None:
    with connect_redis(redis_server.url) as redis:
        before = set(redis.scan_iter(keys.response("", "*")))
        first = asked(line, {**CREATE, "store": False})[-1]["response"]
        more = {"input": "And then?", "previous_response_id": first["id"], "store": False}
        second = asked(line, {**CREATE, **more})
        assert set(redis.scan_iter(keys.response("", "*"))) == before
    whole = [{"role": "user", "content": ASK["input"]}, *first["output"]]
    whole.append({"role": "user", "content": "And then?"})
    assert text_of(second) == api.responses.create(**{**ASK, "input": whole}).output_text
    # Only the last: an agent keeps its connection for hours.
    assert asked(line, {**CREATE, **more})[-1]["error"]["code"] == "previous_response_not_found"


def test_a_beginning_is_sent_before_its_first_question(line: ClientConnection, api: OpenAI) -> None:
    system = [{"role": "system", "content": "Be kind."}]
    events = asked(line, {**CREATE, "input": system, "generate": False})
    for event in events:
        check_event(event)
    assert kinds(events) == ["response.created", "response.in_progress", "response.completed"]
    begun = events[-1]["response"]
    assert begun["output"] == []
    goes_on = asked(line, {**CREATE, "previous_response_id": begun["id"]})
    whole = [*system, {"role": "user", "content": ASK["input"]}]
    assert text_of(goes_on) == api.responses.create(**{**ASK, "input": whole}).output_text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", "body"),
        ("[]", "body"),
        ("[" * 100_000, "body"),
        ({"input": "Hi"}, "type"),
        ({"type": "response.cancel"}, "type"),
        ({**CREATE, "background": True}, "background"),
        ({**CREATE, "temperature": 3}, "temperature"),
        ({**CREATE, "input": [{"role": "user"}]}, "input.0"),
    ],
)
def test_what_is_wrong_is_named_and_the_connection_goes_on(
    line: ClientConnection, message: object, param: str
) -> None:
    (error,) = asked(line, message)
    openresponses_types.WebSocketErrorEvent.model_validate(error)
    assert error["status"] == 400
    assert error["error"]["param"].startswith(param)
    assert asked(line, CREATE)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("messages", [1, 4])
def test_who_hangs_up_cancels_what_it_waits_for(
    talker: WorkerProcess,
    gateway: GatewayProcess,
    redis_server: RedisServer,
    client: Client,
    messages: int,
) -> None:
    with connect_redis(redis_server.url) as redis, talker.paused():
        before = set(redis.scan_iter(keys.response("*")))
        with connect(address(gateway)) as hasty:
            for _ in range(messages):
                hasty.send(json.dumps(CREATE))
            wait_until(lambda: set(redis.scan_iter(keys.response("*"))) - before)
            (key,) = set(redis.scan_iter(keys.response("*"))) - before
            job = client.job(str(key).rpartition(":")[2])
            # The response is stored first: a hang-up before the job is sent leaves none to cancel.
            wait_until(lambda: job.status().state == "queued")
        wait_until(lambda: job.status().state == "cancelled")


def test_more_messages_than_may_wait_are_refused(
    talker: WorkerProcess, line: ClientConnection
) -> None:
    asked(line, CREATE)
    with talker.paused():
        for _ in range(10):
            line.send(json.dumps(CREATE))
        refused = json.loads(line.recv(30))
        while refused["type"] != "error":
            refused = json.loads(line.recv(30))
    openresponses_types.WebSocketErrorEvent.model_validate(refused)
    assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    while json.loads(line.recv(30))["type"] != "response.incomplete":
        pass


def test_a_connection_is_refused_as_a_request_is(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    def refused(url: str, **headers: str) -> int:
        with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
            pass
        assert "error" in json.loads(caught.value.response.body or b"{}")
        return caught.value.response.status_code

    assert refused(address(gateway), Origin="https://evil.example") == 403
    file = tmp_path / "keys.toml"
    key, entry = new_key("one")
    file.write_text(entry)
    with running_gateway(redis_server.url, tmp_path, keys=file) as guarded:
        assert refused(address(guarded)) == 401
        assert refused(address(guarded), Authorization="Bearer wrong") == 401
        with connect(
            f"{address(guarded)}?q=secret", additional_headers={"Authorization": f"Bearer {key}"}
        ) as line:
            line.send("{}")
            assert json.loads(line.recv(30))["error"]["param"] == "type"
            file.write_text("")
            wait_until(lambda: _revoked(line))
    for process in (gateway, guarded):
        assert "ERROR" not in process.log.read_text()
    assert "[accepted]" in guarded.log.read_text()
    assert "secret" not in guarded.log.read_text()


def _revoked(line: ClientConnection) -> bool:
    line.send("{}")
    return bool(json.loads(line.recv(30))["status"] == 401)


def test_a_connection_may_wait_longer_than_a_header(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        running_gateway(redis_server.url, tmp_path, header_timeout_s=1) as hasty,
        connect(address(hasty)) as waiting,
    ):
        host, port = hasty.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as silent:
            # It came later, and its time is over.
            assert silent.recv(1) == b""
        assert asked(waiting, CREATE)[-1]["type"] == "response.incomplete"


def test_each_message_is_counted_as_a_request(line: ClientConnection, http: httpx.Client) -> None:
    def counted(status: str) -> float:
        of_sockets = {("method", "WEBSOCKET"), ("route", PATH), ("status", status)}
        samples = scrape(str(http.base_url).rstrip("/")).samples.items()
        return sum(count for (_, labels), count in samples if of_sockets <= labels)

    before = {status: counted(status) for status in ("200", "400")}
    asked(line, CREATE)
    asked(line, CREATE)
    asked(line, {**CREATE, "temperature": 9})
    wait_until(lambda: counted("400") == before["400"] + 1, what="the count of the refusal")
    assert counted("200") == before["200"] + 2


def frame(opcode: Opcode, data: bytes, *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.mark.parametrize(
    "frames",
    [
        [frame(Opcode.PING, b"x")] * (MOST_SMALL_FRAMES + 1),
        [frame(Opcode.PONG, b"")] * (MOST_SMALL_FRAMES + 1),
        [
            frame(Opcode.TEXT, b"{", fin=False),
            *[frame(Opcode.CONT, b"", fin=False)] * MOST_SMALL_FRAMES,
        ],
    ],
    ids=["pings", "pongs", "pieces"],
)
def test_a_connection_of_many_small_frames_is_closed(
    gateway: GatewayProcess, frames: list[bytes]
) -> None:
    with connect(address(gateway)) as line:
        line.socket.sendall(b"".join(frames))
        with pytest.raises(ConnectionClosedError) as closed:
            line.recv(30)
    assert closed.value.rcvd == Close(1008, "too many small frames")


def test_a_message_may_come_in_many_pieces(gateway: GatewayProcess) -> None:
    pieces = ["{", *[" " * SMALL_FRAME_BYTES] * 2 * MOST_SMALL_FRAMES, "}"]
    with connect(address(gateway)) as line:
        line.send(pieces)
        assert json.loads(line.recv(30))["error"]["param"] == "type"


def test_messages_are_not_compressed(gateway: GatewayProcess) -> None:
    with connect(address(gateway)) as line:
        assert line.protocol.extensions == []
