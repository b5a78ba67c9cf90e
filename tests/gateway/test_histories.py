"""Random histories, as clients and frameworks write them, are read and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benches.histories.sending import Way, sent
from benches.histories.turns import history
from tests.gateway.conftest import model_with_template
from tests.gateway.openai_types import check_item
from tests.gateways import GatewayProcess
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker
from tests.sizes import sized

MODEL = "long"
RECORDED = Path(__file__).parent / "recorded"
FRAMEWORKS = (
    *("ai-sdk", "autogen", "haystack", "instructor", "langchain-openai"),
    *("litellm", "llama-index", "openai-agents", "pydantic-ai"),
)
REQUESTS = [
    pytest.param(json.loads(line), id=f"{framework}-{number}")
    for framework in FRAMEWORKS
    for number, line in enumerate((RECORDED / f"{framework}.jsonl").read_text("utf-8").splitlines())
]
SEEDS = range(sized(usual=10, full=1_000))


@pytest.fixture(scope="module")
def reader(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, trained_model: Path
) -> Iterator[WorkerProcess]:
    """A worker whose model has room for long histories, and whose template reads calls."""
    folder = model_with_template(
        tmp_path_factory.mktemp("model"), trained_model / "hf", max_position_embeddings=8192
    )
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("worker"),
        app=REAL_APP,
        model=folder,
        model_name=MODEL,
    ) as process:
        yield process


def refused(ways: list[Way]) -> list[tuple[int, str]]:
    """Sends the history of each seed in one of ``ways``; what failed."""
    with ThreadPoolExecutor(4) as pool:
        errors = pool.map(lambda seed: sent(ways[seed % len(ways)], history(seed)), SEEDS)
        return [(seed, error) for seed, error in zip(SEEDS, errors, strict=True) if error]


@pytest.mark.usefixtures("reader")
def test_histories_of_openais_package_are_read(gateway: GatewayProcess) -> None:
    from benches.histories.clients.openai_python import ways

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api:
        assert refused(list(ways(api, MODEL).values())) == []


@pytest.mark.usefixtures("reader")
def test_the_model_reads_every_text_and_call_of_a_history(http: httpx.Client) -> None:
    from benches.histories.clients.openai_python import Chat

    for seed in SEEDS:
        turns = history(seed)["turns"]
        body = {"model": MODEL, "messages": Chat(None, MODEL, "dictionaries").made(turns)}
        ids = http.post("/tokenize", json=body).json()["tokens"]
        prompt = http.post("/detokenize", json={"model": MODEL, "tokens": ids}).json()["prompt"]
        said = [text for turn in turns for text in (*turn["texts"], turn.get("refusal") or "")]
        called = [call["name"] for turn in turns for call in turn.get("calls", ())]
        assert [text for text in (*said, *called) if text not in prompt] == [], seed


@pytest.mark.usefixtures("reader")
@pytest.mark.lacks("needs the package anthropic", when=find_spec("anthropic") is None)
def test_histories_of_anthropics_package_are_read(gateway: GatewayProcess) -> None:
    from anthropic import Anthropic

    from benches.histories.clients.anthropic_ import ways

    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as api:
        assert refused(list(ways(api, MODEL).values())) == []


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("sent", REQUESTS)
def test_what_a_framework_sends_is_read(http: httpx.Client, sent: dict[str, Any]) -> None:
    """As ``python -m benches.histories URL --record FOLDER`` wrote it down in November 2026, with
    langchain-openai 1.7.4, litellm 1.110.2, and the newest of the others. Instructor 1.17.0 by
    ``python -m benches.clients URL --only instructor --record FOLDER``: seven modes."""
    body = {**sent["body"], "model": MODEL}
    for most in {"max_tokens", "max_completion_tokens", "max_output_tokens"} & {*body}:
        body[most] = 8
    answer = http.post(sent["path"], headers=sent["headers"], json=body)
    assert answer.status_code == 200, answer.text
    if sent["path"] == "/v1/responses":
        # A call that is cut off is no item.
        assert answer.json()["output"] or answer.json()["status"] == "incomplete"
        for item in answer.json()["output"]:
            check_item(item)
    else:
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
