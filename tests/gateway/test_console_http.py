"""The console without a browser: who may ask what, and which files make the page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.client import Client
from llorch_worker.gateway.console.files import FOLDER
from tests.broker.steps import announce
from tests.gateway.consoles import GUEST, OPERATOR, console_gateway
from tests.gateways import GatewayProcess
from tests.services import RedisServer, own_redis
from tests.store import add_letter, clear_letters
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def guarded(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    with console_gateway(redis_server.url, tmp_path_factory.mktemp("console")) as gateway:
        yield gateway


@pytest.fixture
def plain(guarded: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        yield client


@pytest.fixture
def operator(plain: httpx.Client) -> httpx.Client:
    plain.headers["Authorization"] = f"Bearer {OPERATOR[0]}"
    return plain


def letter(number: int, message: str = "x", **fields: object) -> str:
    known = {"id": f"job-{number}", "reason": "died", "list": "llorch.toy", "attempts": 1}
    return json.dumps(known | {"history": "", "at_ms": number, "message": message, **fields})


def test_what_operators_do_needs_their_key_and_json(plain: httpx.Client) -> None:
    def answer(method: str, path: str, key: str | None, **options: Any) -> int:
        headers = options.pop("headers", {})
        if key is not None:
            headers = headers | {"Authorization": f"Bearer {key}"}
        return plain.request(method, f"/console/api/{path}", headers=headers, **options).status_code

    tried = (None, "llorch-wrong", GUEST[0], OPERATOR[0])
    assert [answer("GET", "jobs", key) for key in tried] == [401, 401, 200, 200]
    for path in ("pulse", "fleet", "history", "ended", "dead-letters"):
        assert [answer("GET", path, key) for key in tried] == [401, 401, 403, 200]
    for path in ("dead-letters/retry", "dead-letters/drop"):
        body = {"ids": ["x"]}
        assert answer("POST", path, GUEST[0], json=body) == 403
        assert answer("POST", path, OPERATOR[0], json=body) == 200
        # A page of another origin can send such a request without asking the gateway first.
        for simple in ({}, {"Content-Type": "text/plain"}):
            text = json.dumps(body)
            assert answer("POST", path, OPERATOR[0], headers=simple, content=text) == 400


def test_the_pages_files_are_checked_by_etag_and_load_nothing_from_elsewhere(
    plain: httpx.Client,
) -> None:
    for path in ("/", "/console/main.js", "/console/console.css"):
        first = plain.get(path)
        policy = first.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "data:" not in policy
        assert first.headers["x-content-type-options"] == "nosniff"
        again = {"If-None-Match": first.headers["etag"]}
        assert plain.get(path, headers=again).status_code == 304
    assert plain.get("/console/routes.py").status_code == 404


def test_the_pages_files_are_small_and_say_whose_the_renderer_is() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 350_000
    banner = (FOLDER / "markdown-it.js").read_text().splitlines()[0]
    found = re.search(r"markdown-it (\S+) \S+ @license MIT", banner)
    assert found is not None
    notice = " ".join((FOLDER / "markdown-it.txt").read_text().split())
    assert f"npm package markdown-it {found[1]}" in notice
    assert "Permission is hereby granted, free of charge" in notice


def test_the_other_page_of_this_origin_runs_no_script_but_its_own(plain: httpx.Client) -> None:
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/..%2fcore.py"):
        assert plain.get(path).status_code == 404
    page = plain.get("/docs")
    assert page.status_code == 200, page.text
    policy = page.headers["content-security-policy"]
    assert re.search(r"script-src 'self' 'sha256-[A-Za-z0-9+/=]+';", policy)
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy


def test_without_keys_only_loopback_names_are_answered(
    gateway: GatewayProcess, guarded: GatewayProcess
) -> None:
    def status(url: str, host: str) -> int:
        return httpx.get(f"{url}/console/api/fleet", headers={"Host": host}).status_code

    port = gateway.url.rpartition(":")[2]
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "127.0.0.2", "[::1]:80"):
        assert status(gateway.url, host) == 200
    # What a browser sends for a page whose site lets its name resolve to 127.0.0.1.
    for host in (f"evil.example:{port}", "localhost.evil.example", "10.0.0.1", "[", "", "0.0.0.0"):
        assert status(gateway.url, host) == 421
    # With keys a page of another site is nobody.
    assert status(guarded.url, "evil.example") == 401


def test_without_keys_no_page_of_another_site_may_change_anything(
    gateway: GatewayProcess, guarded: GatewayProcess
) -> None:
    def status(url: str, origin: str | None, method: str = "POST") -> int:
        # A browser sends such a form without asking the gateway first.
        form = {"files": {"file": ("x.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        options: dict[str, Any] = form if method == "POST" else {}
        headers = {} if origin is None else {"Origin": origin}
        return httpx.request(method, f"{url}/v1/files", headers=headers, **options).status_code

    for own in (None, gateway.url, "http://localhost:3000", "http://[::1]"):
        assert status(gateway.url, own) == 200
    for foreign in ("https://evil.example", "http://localhost.evil.example", "null", "http://["):
        assert status(gateway.url, foreign) == 403
        assert status(gateway.url, foreign, "GET") == 200
    foreign_page = {"Origin": "https://evil.example"}
    empty = httpx.post(f"{gateway.url}/v1/batches/x/cancel", headers=foreign_page)
    assert empty.json()["error"]["llorch_code"] == "FOREIGN_ORIGIN"
    # The console through a proxy that sends a loopback name as Host.
    proxied = {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(f"{gateway.url}/v1/batches/x/cancel", headers=proxied).status_code == 404
    # With keys a page of another site is nobody.
    assert status(guarded.url, "https://evil.example") == 401


def test_letters_are_told_without_their_messages_and_each_change_changes_the_version(
    operator: httpx.Client, client: Client
) -> None:
    def read() -> tuple[str, list[str]]:
        known = operator.get("/console/api/dead-letters").json()
        return known["version"], [each["id"] for each in known["letters"]]

    versions = [read()[0]]
    for number in range(3):
        add_letter(client.redis, letter(number, f"secret {'é' * 100_000}"))
        versions.append(read()[0])
    answer = operator.get("/console/api/dead-letters")
    assert "secret" not in answer.text
    first = answer.json()["letters"][0]
    assert (first["id"], first["model"], first["message_bytes"]) == ("job-2", "toy", 200_007)
    # One comes as another goes, as when the list is full.
    add_letter(client.redis, letter(3))
    client.redis.rpop(keys.DEAD)
    versions.append(read()[0])
    assert len(set(versions)) == len(versions)
    assert read()[1] == ["job-3", "job-2", "job-1"]
    chosen = {"ids": ["job-1", "job-0"]}
    outcomes = operator.post("/console/api/dead-letters/drop", json=chosen).json()["outcomes"]
    assert outcomes == {"job-1": "dropped", "job-0": "gone"}
    assert read()[1] == ["job-3", "job-2"]
    clear_letters(client.redis)


def test_queues_that_no_worker_serves_and_silent_workers_are_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("fleet")
    with own_redis() as server, Client(server.url) as client:
        announce(client.redis)
        client.redis.lpush("llorch.tyo", "a job")
        for name, age_s in (("here@h", 0), ("gone@h", 10)):
            card = worker_card(name, time.time() - age_s)
            registry.announce(client.redis, WorkerCard(**card))
        with console_gateway(server.url, folder) as gateway:
            headers = {"Authorization": f"Bearer {OPERATOR[0]}"}
            fleet = httpx.get(f"{gateway.url}/console/api/fleet", headers=headers).json()
    assert fleet["unserved"] == {"llorch.tyo": 1}
    silent = {worker["hostname"]: worker["silent"] for worker in fleet["workers"]}
    assert silent == {"here@h": False, "gone@h": True}
    (told, _) = fleet["workers"]
    figures = ("prompt_tokens", "cached_tokens", "kv_blocks_total", "kv_blocks_used")
    assert [told[name] for name in figures] == [100, 40, 10, 4]
    assert (told["memory_bytes"], told["last_death"]) == (3 << 30, "signal SIGSEGV")
    assert 60 <= told["died_s"] < 120
    totals = ("workers", "silent", "kv_blocks_total", "prompt_tokens")
    assert [fleet["totals"][name] for name in totals] == [2, 1, 20, 200]


def worker_card(hostname: str, last_seen: float) -> dict[str, Any]:
    return {
        "hostname": hostname,
        "pid": 1,
        "model": "toy",
        "max_context": 64,
        "max_sequences": 2,
        "device": "cpu",
        "started_at": last_seen - 60,
        "last_seen": last_seen,
        "last_death": "signal SIGSEGV",
        "last_death_at": time.time() - 60,
        "engine": {
            "bytes": {"weights": 2 << 30, "kv": 1 << 30},
            "kv_blocks_total": 10,
            "kv_blocks_free": 6,
            "prompt_tokens_total": 1_000_000,
        },
        "recent": {"prompt_tokens": 100, "cached_tokens": 40},
    }


def test_a_redis_that_hangs_is_given_up_soon_and_once_for_all_pages(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("hangs")
    headers = {"Authorization": f"Bearer {OPERATOR[0]}"}
    with (
        own_redis() as server,
        console_gateway(server.url, folder) as gateway,
        # As patient as a page. Thirty that wait for one another take a minute.
        httpx.Client(base_url=gateway.url, headers=headers, timeout=10) as http,
    ):
        assert http.get("/console/api/jobs").status_code == 200
        with server.paused(), ThreadPoolExecutor(30) as pages:
            answers = list(pages.map(http.get, ["/console/api/fleet"] * 30))
            assert {answer.status_code for answer in answers} == {503}
        assert wait_until(lambda: http.get("/console/api/fleet").status_code == 200)
