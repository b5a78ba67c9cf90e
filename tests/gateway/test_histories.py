"""Random histories, as the packages openai and anthropic write them, are read and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from benches.histories.sending import Way, sent
from benches.histories.turns import history
from tests.gateway.conftest import TEMPLATE
from tests.gateways import GatewayProcess
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker
from tests.sizes import sized

MODEL = "long"
SEEDS = range(sized(usual=40, full=1_000))


@pytest.fixture(scope="module")
def reader(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, trained_model: Path
) -> Iterator[WorkerProcess]:
    """A worker whose model has room for long histories, and whose template reads calls."""
    folder = tmp_path_factory.mktemp("model")
    for file in (trained_model / "hf").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    for name, text in (("config.json", json.dumps(config)), ("chat_template.jinja", TEMPLATE)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)
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
