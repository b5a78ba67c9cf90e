"""Webhooks reach their receiver, signed, at least once, whatever dies; and nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from llorch_worker.broker import keys
from llorch_worker.client import BrokerUnavailable, Client
from llorch_worker.gateway.app import create_app
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.webhook_secret import new_secret
from llorch_worker.gateway.webhooks.address import PinnedBackend, url_fault
from llorch_worker.gateway.webhooks.receivers import MOST_AT_ONCE, Receivers
from llorch_worker.settings import Settings
from tests.gateway.receiver import Receiver, failing, running_receiver, status
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until

SECRET = new_secret()
QUICK: dict[str, Any] = {
    "private_callbacks": True,
    "webhook_secret": SECRET,
    "webhook_retry_s": 0.05,
}

Start = Callable[..., AbstractContextManager[GatewayProcess]]


@pytest.fixture(autouse=True)
def nothing_left_over(client: Client) -> None:
    """What an earlier test left must not reach this one's gateways."""
    client.redis.delete(keys.WEBHOOKS, keys.dead_webhooks(""))


@pytest.fixture
def start(redis_server: RedisServer, toy_worker: WorkerProcess, tmp_path: Path) -> Start:
    """Starts gateways that may call this machine."""

    def begin(name: str = "g1", **settings: Any) -> AbstractContextManager[GatewayProcess]:
        folder = tmp_path / name
        folder.mkdir()
        return running_gateway(redis_server.url, folder, **(QUICK | settings))

    return begin


@pytest.fixture
def gateway_(start: Start) -> Iterator[GatewayProcess]:
    with start() as gateway:
        yield gateway


def submit(gateway: GatewayProcess, url: str, **fields: Any) -> str:
    body = {"prompt": "x", "max_tokens": 2, "callback_url": url, **fields}
    answer = httpx.post(f"{gateway.url}/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def told(receiver: Receiver, times: int = 1) -> None:
    wait_until(lambda: len(receiver.deliveries) >= times, what=f"{times} deliveries")


def dead(gateway: GatewayProcess) -> list[dict[str, Any]]:
    return list(httpx.get(f"{gateway.url}/v1/webhooks/dead").json()["data"])


def outbox_is_empty(client: Client) -> bool:
    return not client.redis.exists(keys.WEBHOOKS)


def test_the_end_of_a_job_is_told_once_signed(gateway_: GatewayProcess, client: Client) -> None:
    with running_receiver() as receiver:
        job_id = submit(gateway_, receiver.url)
        told(receiver)
        (delivery,) = receiver.deliveries
        document = delivery.verified(SECRET)
        assert (document["type"], delivery.path) == ("job.completed", "/hook?a=b")
        assert document["data"] == httpx.get(f"{gateway_.url}/v1/jobs/{job_id}").json()
        assert delivery.headers["webhook-id"] == job_id
        assert delivery.headers["host"] == receiver.url.split("/")[2]
        wait_until(lambda: outbox_is_empty(client))
        assert not client.redis.exists(keys.webhook(job_id))
    assert len(receiver.deliveries) == 1


def test_failures_and_cancels_are_told_too(gateway_: GatewayProcess, latch: Latch) -> None:
    with running_receiver() as receiver:
        submit(gateway_, receiver.url, prompt="raise ValueError")
        told(receiver)
        assert receiver.deliveries[0].document["type"] == "job.failed"
        assert receiver.deliveries[0].document["data"]["error"]["code"] == "INTERNAL"
        job_id = submit(gateway_, receiver.url, prompt=latch.prompt())
        httpx.delete(f"{gateway_.url}/v1/jobs/{job_id}")
        told(receiver, 2)
        assert receiver.deliveries[1].document["type"] == "job.cancelled"


def test_a_receiver_that_fails_gets_the_same_message_again(gateway_: GatewayProcess) -> None:
    with running_receiver(failing(3)) as receiver:
        submit(gateway_, receiver.url)
        told(receiver, 4)
        assert len({(d.body, d.headers["webhook-id"]) for d in receiver.deliveries}) == 1
        for delivery in receiver.deliveries:
            delivery.verified(SECRET)
    assert dead(gateway_) == []


def test_a_redirect_is_not_followed(gateway_: GatewayProcess, client: Client) -> None:
    with (
        running_receiver() as elsewhere,
        running_receiver(status(307, location=elsewhere.url)) as receiver,
    ):
        job_id = submit(gateway_, receiver.url)
        told(receiver, 2)
        reason = wait_until(lambda: client.redis.hget(keys.webhook(job_id), "reason"))
        assert reason == "the receiver answered 307"
        assert elsewhere.deliveries == []


def test_the_body_of_an_answer_is_not_read(gateway_: GatewayProcess, client: Client) -> None:
    cut_off = threading.Event()

    def pour(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _number in range(10_000):
                handler.wfile.write(b"x" * 100_000)
        except OSError:
            cut_off.set()

    with running_receiver(pour) as receiver:
        submit(gateway_, receiver.url)
        assert cut_off.wait(30)
        wait_until(lambda: outbox_is_empty(client))
    assert len(receiver.deliveries) == 1


def test_slow_receivers_delay_nobody_else(
    gateway_: GatewayProcess, client: Client, latch: Latch
) -> None:
    slow_ones = 3 * MOST_AT_ONCE
    go_on = threading.Event()
    with running_receiver(lambda handler, _: bool(go_on.wait(30))) as slow:  # type: ignore[arg-type, return-value]
        # They end together, before the other job is sent.
        ids = [submit(gateway_, slow.url, prompt=latch.prompt()) for _ in range(slow_ones)]
        assert not slow.deliveries
        latch.open()
        for job_id in ids:
            client.job(job_id).result(60)
        told(slow, MOST_AT_ONCE)
        with running_receiver() as receiver:
            submit(gateway_, receiver.url)
            told(receiver)
        assert len(slow.deliveries) < slow_ones
        go_on.set()


def test_a_receiver_that_does_not_answer_is_tried_alone_and_then_as_before() -> None:
    receivers = Receivers(first_pause_s=0.001)
    assert receivers.has_room("a", 3)
    receivers.note("a", answered=False)
    wait_until(lambda: receivers.has_room("a", 0))
    assert not receivers.has_room("a", 1)
    assert receivers.has_room("b", 1)
    receivers.note("a", answered=True)
    assert receivers.has_room("a", 3)


def test_a_webhook_that_nobody_takes_becomes_a_dead_letter(start: Start, client: Client) -> None:
    answer = status(500)
    with (
        start(webhook_give_up_s=0.4) as gateway,
        running_receiver(lambda handler, number: answer(handler, number)) as receiver,
    ):
        job_id = submit(gateway, receiver.url)
        (letter,) = wait_until(lambda: dead(gateway))
        assert (letter["id"], letter["reason"]) == (job_id, "the receiver answered 500")
        assert letter["attempts"] == len(receiver.deliveries) - 1
        assert outbox_is_empty(client)
        answer = status(204)
        assert httpx.post(f"{gateway.url}/v1/webhooks/dead/{job_id}/retry").status_code == 202
        wait_until(lambda: outbox_is_empty(client) and not dead(gateway))
        receiver.deliveries[-1].verified(SECRET)
        missing = httpx.post(f"{gateway.url}/v1/webhooks/dead/{job_id}/retry")
        assert missing.status_code == 404


def test_a_receiver_that_wants_no_more_gets_no_more(start: Start) -> None:
    with start() as gateway, running_receiver(status(410)) as receiver:
        job_id = submit(gateway, receiver.url)
        (letter,) = wait_until(lambda: dead(gateway))
        assert letter["id"] == job_id
        assert len(receiver.deliveries) == 1


def test_a_gateway_that_dies_before_the_end_leaves_the_webhook_to_another(
    start: Start, latch: Latch
) -> None:
    with running_receiver() as receiver, start("first") as first, start("second"):
        submit(first, receiver.url, prompt=latch.prompt())
        first.kill()
        latch.open()
        told(receiver)
        receiver.deliveries[0].verified(SECRET)


def test_a_gateway_that_dies_in_the_midst_of_an_attempt_loses_nothing(
    start: Start, client: Client
) -> None:
    go_on = threading.Event()

    def respond(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number == 0:
            go_on.wait(60)
        else:
            status(204)(handler, number)

    with running_receiver(respond) as receiver, start("first") as first:
        job_id = submit(first, receiver.url)
        told(receiver)
        first.kill()
        # As if the lease had ended.
        client.redis.zadd(keys.WEBHOOKS, {job_id: 0})
        with start("second"):
            told(receiver, 2)
            wait_until(lambda: outbox_is_empty(client))
        go_on.set()
    assert {d.headers["webhook-id"] for d in receiver.deliveries} == {job_id}


def test_a_refused_job_leaves_no_webhook(gateway_: GatewayProcess, client: Client) -> None:
    body = {"prompt": "x", "model": "unknown", "callback_url": "http://127.0.0.1:1/"}
    before = set(client.redis.scan_iter(keys.webhook("*")))
    assert httpx.post(f"{gateway_.url}/v1/jobs", json=body).status_code == 404
    assert outbox_is_empty(client)
    assert set(client.redis.scan_iter(keys.webhook("*"))) == before


def test_a_job_that_may_be_enqueued_keeps_its_webhook(
    redis_server: RedisServer, toy_worker: WorkerProcess, client: Client, tmp_path: Path
) -> None:
    own = GatewaySettings(files=str(tmp_path), **QUICK)
    app = create_app(Settings(redis_url=redis_server.url), own)
    submit = app.state.gateway.client.submit
    ids: list[str] = []

    async def reply_is_lost(*request: Any, **options: Any) -> None:
        ids.append((await submit(*request, **options)).id)
        raise BrokerUnavailable

    app.state.gateway.client.submit = reply_is_lost

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"prompt": "x", "max_tokens": 2, "callback_url": "http://127.0.0.1:1/"}
            return await http.post("/v1/jobs", json=body)

    assert asyncio.run(post()).status_code == 503
    assert client.redis.zrange(keys.WEBHOOKS, 0, -1) == ids


def test_without_a_secret_no_callback_is_accepted(start: Start) -> None:
    with start(webhook_secret="") as gateway:
        body = {"prompt": "x", "callback_url": "http://127.0.0.1:1/"}
        refused = httpx.post(f"{gateway.url}/v1/jobs", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "callback_url")
        assert "LLORCH_GATEWAY_WEBHOOK_SECRET" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "http:///x",
        "example.com",
        "http://user:pass@example.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://exa mple.com/",
        "http://example.com/\r\nX: y",
        "http://bücher.example/",
    ],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    assert url_fault(url, private=True)


PRIVATE_HOSTS = """
localhost a.localhost LOCALHOST. 127.0.0.1 127.1 0x7f000001 2130706433 0.0.0.0 10.1.2.3
172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 198.18.0.1 192.0.2.1 224.0.0.1
255.255.255.255 240.0.0.1 [::1] [::] [fe80::1] [fc00::1] [fec0::1] [ff02::1]
[::ffff:127.0.0.1] [::ffff:0:127.0.0.1] [::ffff:8.8.8.8] [::127.0.0.1]
[64:ff9b::7f00:1] [2002:7f00:1::] [2001::1]
"""


@pytest.mark.parametrize("host", PRIVATE_HOSTS.split())
def test_literally_private_hosts_are_refused(host: str) -> None:
    assert url_fault(f"http://{host}:80/hook", private=False)
    assert url_fault(f"http://{host}:80/hook", private=True) is None


@pytest.mark.parametrize("host", ["8.8.8.8", "[2606:4700::1111]", "example.com", "1e100.net"])
def test_public_hosts_are_allowed(host: str) -> None:
    assert url_fault(f"https://{host}/hook", private=False) is None


def test_private_urls_are_refused_at_submit(http: httpx.Client, toy_worker: WorkerProcess) -> None:
    body = {"prompt": "x", "callback_url": "http://169.254.169.254/latest/meta-data"}
    refused = http.post("/v1/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "callback_url")
    assert "169.254" not in refused.text


class NameServer:
    """Answers each question of ``getaddrinfo`` with the next list of addresses."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in self._answers.pop(0)
        ]


class Recorder(httpcore.AsyncMockBackend):
    """Records where connections go."""

    def __init__(self) -> None:
        super().__init__([])
        self.connected: list[str] = []

    async def connect_tcp(self, host: str, *args: Any, **more: Any) -> Any:
        self.connected.append(host)
        return await super().connect_tcp(host, *args, **more)


async def _connect(backend: PinnedBackend) -> None:
    await backend.connect_tcp("rebinding.example", 80, timeout=5)


def test_a_name_is_resolved_once_and_the_connection_goes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = NameServer(["8.8.8.8"], ["127.0.0.1"])
    backend, recorder = PinnedBackend(private=False), Recorder()
    monkeypatch.setattr(backend, "_backend", recorder)

    async def connect() -> None:
        # Only for the resolver: asyncio itself asks for names, too.
        monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
        await _connect(backend)

    asyncio.run(connect())
    assert (recorder.connected, names.asked) == (["8.8.8.8"], 1)


@pytest.mark.parametrize("answer", [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:10.0.0.1"]])
def test_a_name_with_a_private_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, answer: list[str]
) -> None:
    backend, recorder = PinnedBackend(private=False), Recorder()
    monkeypatch.setattr(backend, "_backend", recorder)
    monkeypatch.setattr(socket, "getaddrinfo", NameServer(answer).getaddrinfo)
    with pytest.raises(httpcore.ConnectError, match="private"):
        asyncio.run(_connect(backend))
    assert recorder.connected == []
