"""Gateways over the workers of the module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from llorch_worker.gateway.keys import new_key
from tests.gateway.claims import ORIGIN, Door
from tests.gateways import GatewayProcess, running_gateway
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def model_with_template(to: Path, files: Path, template: str = TEMPLATE, **config: Any) -> Path:
    """``to`` with the ``files`` of a model's folder, this chat template and these settings."""
    for file in files.iterdir():
        (to / file.name).symlink_to(file)
    settings = json.loads((files / "config.json").read_text()) | config
    for name, text in (("config.json", json.dumps(settings)), ("chat_template.jinja", template)):
        (to / name).unlink(missing_ok=True)
        (to / name).write_text(text)
    return to


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway on ``redis_server``, which serves whatever workers the module starts."""
    with running_gateway(redis_server.url, tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(scope="module")
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A plain HTTP client of ``gateway``."""
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def own_gateway(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway for one test, which may stop it, over ``own_worker``."""
    with running_gateway(own_server.url, tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(scope="module")
def talker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, trained_model: Path
) -> Iterator[WorkerProcess]:
    """A worker with the real engine: model ``stories``, with a chat template that has tools."""
    folder = model_with_template(tmp_path_factory.mktemp("model"), trained_model / "hf")
    logs = tmp_path_factory.mktemp("worker")
    with running_worker(
        redis_server.url, logs, app=REAL_APP, model=folder, model_name="stories"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def api(talker: WorkerProcess, gateway: GatewayProcess) -> Iterator[OpenAI]:
    """OpenAI's own client, over ``talker``."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def wire(api: OpenAI, http: httpx.Client) -> httpx.Client:
    """A plain HTTP client, over ``talker``."""
    return http


@pytest.fixture(scope="module")
def door(
    api: OpenAI,
    http: httpx.Client,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Door]:
    """What claims of other suites are held against, over ``talker``."""
    key, entry = new_key("claims")
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.toml").write_text(entry)
    with (
        running_gateway(
            redis_server.url, folder, keys=folder / "keys.toml", cors_origins=ORIGIN
        ) as keyed,
        httpx.Client(base_url=keyed.url, timeout=60) as client,
    ):
        yield Door(http, api, client, key)
