"""What tenants used, through every door."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import httpx
import pytest

from llorch_worker.client import Client
from llorch_worker.gateway.keys import new_key
from tests.cli.command import run
from tests.gateways import running_gateway
from tests.services import RedisServer, WorkerProcess, begun
from tests.telemetry.scraping import parse


def test_a_key_sees_its_own_usage_and_an_operator_all(
    redis_server: RedisServer,
    toy_worker: WorkerProcess,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (alice, one), (bob, two) = new_key("alice"), new_key("bob")
    file = tmp_path / "keys.toml"
    file.write_text(f"{one}{two}operator = true\n")
    client.submit(prompt="x", max_tokens=3, tenant="acme").result(60)
    endless = begun(client.submit(prompt="x", max_tokens=4000, tenant="cancelled"))
    endless.cancel()
    with running_gateway(redis_server.url, tmp_path, keys=file) as gateway:

        def ask(secret: str, path: str, **options: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {secret}"}
            return httpx.get(f"{gateway.url}{path}", headers=headers, params=options, timeout=60)

        body = {"prompt": "x", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {alice}"}
        httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60)
        (own,) = ask(alice, "/v1/usage").json()["data"]
        assert (own["tenant"], own["jobs"], own["completion_tokens"]) == ("alice", 1, 2)
        assert ask(alice, "/v1/usage", tenant="acme").json()["data"] == [own]
        everyones = {row["tenant"]: row for row in ask(bob, "/v1/usage").json()["data"]}
        assert everyones["alice"] == own
        assert everyones["acme"]["completion_tokens"] == 3
        assert everyones["cancelled"]["completion_tokens"] > 0
        for day in ("2020-01-01", "0005-01-01"):
            assert ask(bob, "/v1/usage", until=day).json()["data"] == []
        assert ask(alice, "/v1/usage", since="0001-01-01").json()["data"] == [own]
        scrape = parse(ask(bob, "/metrics").text)
        assert scrape("llorch_usage_tokens_total", tenant="alice", kind="completion") == 2
        assert scrape("llorch_usage_jobs_total", tenant="acme", kind="done") == 1
    monkeypatch.setenv("LLORCH_REDIS_URL", redis_server.url)
    (row,) = csv.DictReader(run("usage", "--csv", "--tenant", "alice").out.splitlines())
    assert row == {name: str(value) for name, value in own.items()}
    assert json.loads(run("usage", "--json", "--tenant", "alice").out) == [own]
    assert json.loads(run("usage", "--json", "--until", "0005-01-01").out) == []
