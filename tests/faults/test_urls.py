"""Clients and workers at a Redis with TLS, on a Unix socket and behind Sentinel."""

from __future__ import annotations

import asyncio
import subprocess
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llorch_worker.broker.connections.connection import connect, connect_async
from llorch_worker.broker.connections.time_limits import CONNECT_TIMEOUT_S
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract import Cancelled
from tests.faults.sentinel import PASSWORD, sentinel
from tests.services import (
    LOCALHOST,
    free_port,
    own_redis,
    redis_binaries,
    running_worker,
    token_ids,
    wait_until,
)
from tests.store import held_ids

GET_S = 60
NAMES = f"IP:{LOCALHOST},DNS:localhost"


def has_tls(binary: Path) -> bool:
    # Port 0 keeps it from starting in either case.
    asked = [binary, "--tls-port", "0", "--port", "0"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return "Bad directive" not in answer.stdout + answer.stderr


def certificate(folder: Path, names: str = NAMES) -> tuple[Path, Path]:
    """A self-signed certificate for these names, and its key."""
    paths = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", f"subjectAltName={names}",
        "-out", paths[0], "-keyout", paths[1],
    ]  # fmt: skip
    try:
        subprocess.run(command, capture_output=True, timeout=30, check=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return paths


@dataclass(frozen=True)
class TlsOptions:
    binary: Path
    public: Path
    server: tuple[str, ...]

    def at(self, port: int) -> tuple[str, ...]:
        return ("--tls-port", str(port), *self.server)


@pytest.fixture
def tls(tmp_path: Path) -> TlsOptions:
    return tls_options(tmp_path)


def tls_options(folder: Path, names: str = NAMES) -> TlsOptions:
    binary = next((binary for binary in redis_binaries() if has_tls(binary)), None)
    if binary is None:
        pytest.skip("needs a redis-server with TLS")
    public, key = certificate(folder, names)
    options = (
        "--tls-auth-clients", "no", "--tls-cert-file", str(public), "--tls-key-file", str(key),
        "--tls-ca-cert-file", str(public),
    )  # fmt: skip
    return TlsOptions(binary, public, options)


@pytest.fixture
def tls_url(tls: TlsOptions) -> Iterator[str]:
    port = free_port()
    with own_redis(binary=tls.binary, options=tls.at(port)):
        yield f"rediss://{LOCALHOST}:{port}/0?ssl_ca_certs={tls.public}"


@pytest.fixture
def unix_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("socket") / "redis.sock"
    with own_redis(options=("--unixsocket", str(path), "--requirepass", PASSWORD)):
        yield f"unix://:{PASSWORD}@{path}?db=1"


@pytest.fixture
def sentinel_url(tmp_path: Path) -> Iterator[str]:
    with (
        own_redis(options=("--requirepass", PASSWORD)) as master,
        sentinel(tmp_path, master) as first,
        sentinel(tmp_path, master) as second,
    ):
        # The first Sentinel of the URL does not run.
        hosts = [f"sentinel://:{PASSWORD}@{LOCALHOST}:{port}" for port in (1, first, second)]
        url = f"{';'.join(hosts)}/1?master_name=jobs"

        def found() -> bool:
            with connect(url) as client:
                return bool(client.ping())

        wait_until(found, what="the Sentinels to know their master")
        yield url


@pytest.fixture(params=["tls_url", "unix_url", "sentinel_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_a_job_is_streamed_read_and_cancelled_and_no_log_shows_the_password(
    url: str, tmp_path: Path
) -> None:
    with (
        running_worker(url, tmp_path, model_name="toy", TOY_STEP_MS=2) as worker,
        Client(url, model="toy") as client,
    ):
        job = client.submit(prompt="x", max_tokens=50)
        assert len(token_ids(job.stream(timeout=GET_S))) == 50
        assert job.result(GET_S).attempts == 1
        endless = client.submit(prompt="x", max_tokens=4000)
        wait_until(lambda: held_ids(client.redis) == {endless.id})
        endless.cancel()
        with pytest.raises(Cancelled):
            endless.result(GET_S)
        wait_until(lambda: not held_ids(client.redis))
        assert PASSWORD not in worker.text()
        assert worker.text().count("Connected to") == 1


def test_the_asynchronous_client_connects_too(url: str) -> None:
    async def models() -> list[ModelCard]:
        async with AsyncClient(url, model="toy") as client:
            return await client.models()

    assert asyncio.run(models()) == []


def test_an_untrusted_certificate_is_refused(tls_url: str) -> None:
    with Client(tls_url.partition("?")[0]) as client, pytest.raises(Exception, match="certificate"):
        client.models()


def test_hundreds_of_asynchronous_readers_connect_at_once(url: str) -> None:
    async def read() -> list[object]:
        async with connect_async(url) as client:
            return await asyncio.gather(*(client.blpop([f"none{n}"], 0.1) for n in range(300)))

    assert asyncio.run(read()) == [None] * 300


def test_hundreds_of_readers_connect_at_once_when_that_takes_long() -> None:
    taken = asyncio.Semaphore(1)

    async def greet_one_at_a_time(reader: StreamReader, writer: StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection(LOCALHOST, redis.port)
        async with taken:
            await asyncio.sleep(1.3 * CONNECT_TIMEOUT_S / 300)
        await asyncio.gather(passed_on(reader, to_redis), passed_on(from_redis, writer))

    async def passed_on(reader: StreamReader, writer: StreamWriter) -> None:
        while some := await reader.read(4096):
            writer.write(some)
        writer.close()

    async def read() -> list[object]:
        server = await asyncio.start_server(greet_one_at_a_time, LOCALHOST, backlog=300)
        async with server, connect_async(f"redis://{LOCALHOST}:{port_of(server)}/0") as client:
            return await asyncio.gather(*(client.blpop([f"none{n}"], 0.1) for n in range(300)))

    def port_of(server: asyncio.Server) -> int:
        return int(server.sockets[0].getsockname()[1])

    with own_redis() as redis:
        assert asyncio.run(read()) == [None] * 300
