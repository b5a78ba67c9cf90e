"""/openapi.json says all that may be sent, and /docs shows it without anything from elsewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from llorch_worker.anthropic_api.messages import CountTokensRequest, MessagesRequest
from llorch_worker.contract import GenerationRequest
from llorch_worker.gateway.job_document import JobRequest
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.known_fields import KNOWN_FIELDS
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import WholeBody
from llorch_worker.openai_api.tokens import DetokenizeRequest, TokenizeRequest
from tests.gateway.consoles import console_gateway
from tests.gateways import GatewayProcess
from tests.services import RedisServer, WorkerProcess

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def keyed(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    with console_gateway(redis_server.url, tmp_path_factory.mktemp("keyed")) as process:
        yield process


@pytest.fixture(scope="module")
def schemas(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()["components"]["schemas"]
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *(ChatRequest, CompletionRequest, ResponseRequest, MessagesRequest, CountTokensRequest),
        *(TokenizeRequest, DetokenizeRequest, JobRequest),
    ],
)
def test_every_field_that_is_read_is_in_the_schema(
    schemas: dict[str, Any], kind: type[WholeBody | GenerationRequest]
) -> None:
    fields = schemas[kind.__name__]["properties"]
    assert {field.alias or name for name, field in kind.model_fields.items()} <= fields.keys()
    if issubclass(kind, WholeBody):
        assert KNOWN_FIELDS.keys() <= fields.keys()


def test_the_ranges_of_the_contract_are_in_the_schema_of_every_api(
    schemas: dict[str, Any],
) -> None:
    job = schemas["JobRequest"]["properties"]["temperature"]
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest"):
        number, null = schemas[name]["properties"]["temperature"]["anyOf"]
        assert null == {"type": "null"}
        assert number == {"type": "number", "minimum": job["minimum"], "maximum": job["maximum"]}
    assert schemas["ChatRequest"]["properties"]["add_special_tokens"]["anyOf"][0]["const"] is False
    assert "anyOf" not in schemas["ChatRequest"]["properties"]["prediction"]


OF_OTHER_WORKERS = (
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/models/load", "/models/unload"),
)
"""They need a model of vectors or a worker of several models: see ``test_texts.py`` and
``test_models.py``."""


def test_the_examples_work(
    http: httpx.Client, toy_worker: WorkerProcess, schemas: dict[str, Any]
) -> None:
    upload = {"file": ("x", b'{"custom_id": "1"}')}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=upload).json()["id"]
    count = 0
    for path, operations in http.get("/openapi.json").json()["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in body or path in OF_OTHER_WORKERS:
            continue
        name = body["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for example in schemas[name]["examples"]:
            if "input_file_id" in example:
                example = {**example, "input_file_id": file}
            answer = http.post(path, json=example)
            assert answer.status_code in (200, 202), (path, answer.text)
            count += 1
    assert count >= 11


def test_both_are_open_to_all_and_name_the_key(keyed: GatewayProcess) -> None:
    document = httpx.get(f"{keyed.url}/openapi.json").json()
    (scheme,) = document["security"][0]
    assert document["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
    assert httpx.get(f"{keyed.url}/docs").status_code == 200
    assert httpx.get(f"{keyed.url}/docs/nothing.js").status_code == 404


def test_each_endpoint_says_what_it_does_after_an_introduction(keyed: GatewayProcess) -> None:
    document = httpx.get(f"{keyed.url}/openapi.json").json()
    assert "GET /v1/models" in document["info"]["description"]
    assert "needs a key" in document["info"]["description"]
    summaries = {
        f"{method} {path}": operation["summary"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert summaries["post /v1/chat/completions"] == "Answer a chat"
    assert summaries["post /v1/jobs"] == "Enqueue a job, which goes on whoever hangs up"
    # FastAPI's own are the functions' names: List Models.
    assert [said for said in summaries.values() if said == said.title()] == []


@pytest.mark.parametrize("path", ["/docs", "/docs/"])
def test_what_the_page_loads_is_there(keyed: GatewayProcess, path: str) -> None:
    url = f"{keyed.url}{path}"
    addresses = re.findall(r"""(?:href=|src=|url: )["']([^"']+)""", httpx.get(url).text)
    assert {PurePath(address).suffix for address in addresses} == {".css", ".js", ".json", ".svg"}
    for address in addresses:
        assert httpx.get(urljoin(url, address)).status_code == 200, address


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
def test_the_page_shows_every_endpoint_and_asks_no_other_host(keyed: GatewayProcess) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Python's playwright")
    asked: list[str] = []
    said: list[str] = []
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{keyed.url}/docs/")
        chat = page.locator("#operations-chat-create_chat_completion_v1_chat_completions_post")
        chat.wait_for(timeout=PATIENCE_MS)
        chat.locator("button").first.click()
        playwright.expect(chat).to_contain_text("Tell me a story.", timeout=PATIENCE_MS)
        shown = page.locator(".opblock").count()
        chromium.close()
    document = httpx.get(f"{keyed.url}/openapi.json").json()
    assert shown == sum(len(operations) for operations in document["paths"].values())
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {
        urlsplit(keyed.url).netloc
    }
    assert said == []
