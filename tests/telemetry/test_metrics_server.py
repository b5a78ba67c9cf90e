"""The server of a worker's metrics, which must not take from the worker what its jobs need."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from llorch_worker.telemetry.metrics import http_server
from llorch_worker.telemetry.metrics.http_server import MetricsServer, serve
from tests.services import LOCALHOST, free_port
from tests.telemetry.scraping import STRANGE, scrape
from tests.waiting import wait_until

GAUGE = "a_gauge"
HALF = b"GET /metrics HTTP/1.1\r\n"
PATIENCE_S = 120


def defect() -> float:
    raise ZeroDivisionError


@pytest.fixture
def gauge() -> Gauge:
    return Gauge(GAUGE, "A gauge.", registry=CollectorRegistry())


@pytest.fixture
def server(gauge: Gauge) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    registry.register(gauge)
    server = serve(registry, LOCALHOST, free_port())
    assert server is not None
    yield server
    server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection((LOCALHOST, server.port), PATIENCE_S)


def test_connections_beyond_the_limit_are_closed_at_once(server: MetricsServer) -> None:
    with ExitStack() as held:
        for _ in range(http_server.MOST_CONNECTIONS):
            held.enter_context(connect(server)).sendall(HALF)
        with connect(server) as one_more:
            assert one_more.recv(1) == b""

    def answers() -> bool:
        try:
            return scrape(f"{LOCALHOST}:{server.port}")(GAUGE) == 0
        except httpx.TransportError:
            return False

    wait_until(answers)


@pytest.mark.parametrize("sent", [b"", HALF])
def test_a_connection_that_sends_no_more_is_closed(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("llorch_worker.telemetry.metrics.http_server._Handler.timeout", 0.1)
    with connect(server) as idle:
        idle.sendall(sent)
        assert idle.recv(1) == b""


@pytest.mark.parametrize("accept", STRANGE)
def test_a_strange_format_is_answered_in_the_plain_one(server: MetricsServer, accept: str) -> None:
    assert scrape(f"{LOCALHOST}:{server.port}", headers={"Accept": accept})(GAUGE) == 0


def test_a_defect_is_one_line_in_the_log(
    server: MetricsServer,
    gauge: Gauge,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gauge.set_function(defect)
    assert httpx.get(f"http://{LOCALHOST}:{server.port}/metrics").status_code == 500

    def lines() -> list[str]:
        found = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert not any(each.exc_info for each in found)
        return [each.getMessage() for each in found]

    wait_until(lines)
    assert lines() == ["a request for metrics failed: ZeroDivisionError()"]
    assert "Traceback" not in capfd.readouterr().err


class SignalledThread(threading.Thread):
    """Ends before a signal's handler interrupts the caller of ``start``."""

    def start(self) -> None:
        super().start()
        self.join()
        raise SystemExit


def test_a_signal_while_a_scrape_begins_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"/metrics": lambda _: (200, b"", "text/plain")}
    with (
        http_server.Server(LOCALHOST, 0, routes) as server,
        socket.create_connection((LOCALHOST, server.server_port)) as reader,
    ):
        reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        monkeypatch.setattr(threading, "Thread", SignalledThread)
        with pytest.raises(SystemExit):
            server.handle_request()
