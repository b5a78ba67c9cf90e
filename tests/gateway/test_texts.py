"""``/v1/embeddings`` by OpenAI's own client, ``/v1/rerank`` and ``/v1/score``; lines in batches."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from llorch_worker.engine.embedding_engine import EmbeddingEngine
from tests.encoders import WIDTH, WORDS, text_of, write_encoder
from tests.gateways import GatewayProcess
from tests.services import REAL_APP, RedisServer, running_worker, wait_until

TEXTS = [text_of(number) for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module", autouse=True)
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Iterator[None]:
    logs = tmp_path_factory.mktemp("worker")
    with running_worker(redis_server.url, logs, app=REAL_APP, model=folder, model_name="vectors"):
        yield


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    with EmbeddingEngine.load(folder, device="cpu", dtype="float32") as engine:
        return engine.embed(TEXTS).numpy()


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    url = f"{gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openai_s_client_gets_vectors(api: openai.OpenAI, expected: Any, form: Any) -> None:
    # Without a form the client asks for base64 and reads it.
    answer = api.embeddings.create(model="vectors", input=TEXTS, **form)
    vectors: list[Any] = [each.embedding for each in answer.data]
    if form.get("encoding_format") == "base64":
        vectors = [np.frombuffer(b64decode(each), "<f4") for each in vectors]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert [each.index for each in answer.data] == [*range(len(TEXTS))]
    tokens = sum(2 + len(text.split()) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_token_ids_and_dimensions_are_taken(api: openai.OpenAI, folder: Path) -> None:
    ids = [[1, 7, 8, 2], [1, 9, 2]]
    of_ids = api.embeddings.create(model="vectors", input=ids, dimensions=8)
    of_texts = api.embeddings.create(model="vectors", input=["w4 w5", "w6"], dimensions=8)
    assert [each.embedding for each in of_ids.data] == [each.embedding for each in of_texts.data]
    (one,) = api.embeddings.create(model="vectors", input=ids[0]).data
    assert len(one.embedding) == WIDTH


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ["w1", ""]}, "input.1"),
        ({"input": [" ".join(WORDS[:100])]}, "input.0"),
        ({"input": "w1", "dimensions": 65}, "dimensions"),
        ({"input": "w1", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [[1] * 10] * 2_049}, "input"),
        ({}, "input"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, fields: Any, param: str) -> None:
    answer = http.post("/v1/embeddings", json={"model": "vectors", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_list_of_many_token_ids_is_taken(http: httpx.Client) -> None:
    body = {"model": "vectors", "input": [[5] * 60] * 1_000, "encoding_format": "base64"}
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text[:1_000]
    assert answer.json()["usage"]["total_tokens"] == 60_000


def test_documents_are_ranked_as_jina_does(http: httpx.Client, expected: Any) -> None:
    body = {"model": "vectors", "query": TEXTS[1], "documents": TEXTS[2:8], "top_n": 3}
    answer = http.post("/v1/rerank", json=body).json()
    cosines = expected[2:8] @ expected[1]
    best = [int(at) for at in cosines.argsort()[::-1][:3]]
    assert [each["index"] for each in answer["results"]] == best
    assert answer["results"][0]["document"] == {"text": TEXTS[2 + best[0]]}
    objects = body | {"documents": [{"text": text} for text in TEXTS[2:8]]}
    bare = http.post("/v1/rerank", json=objects | {"return_documents": False}).json()
    for each in answer["results"]:
        del each["document"]
    assert bare["results"] == answer["results"]
    one = http.post("/v1/rerank", json=body | {"documents": TEXTS[2]}).json()
    assert [each["document"] for each in one["results"]] == [{"text": TEXTS[2]}]
    refused = http.post("/v1/rerank", json=body | {"documents": ["w1", {"txt": "w2"}]})
    assert refused.json()["error"]["param"] == "documents.1"


def test_pairs_are_scored_as_vllm_does(http: httpx.Client, expected: Any) -> None:
    body = {"model": "vectors", "text_1": TEXTS[1], "text_2": TEXTS[2:5]}
    answer = http.post("/v1/score", json=body).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    scores = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(scores, expected[2:5] @ expected[1], atol=1e-5)


def test_a_model_of_vectors_answers_no_chat(http: httpx.Client) -> None:
    body = {"model": "vectors", "messages": [{"role": "user", "content": "Hi"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "makes vectors: send llorch.embed" in message
    assert "; over HTTP /v1/embeddings, /v1/rerank or /v1/score" in message


def test_lines_of_a_batch_are_answered(api: openai.OpenAI, expected: Any) -> None:
    lines = [
        {
            "custom_id": str(at),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "vectors", "input": text},
        }
        for at, text in enumerate(TEXTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = api.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    done = wait_until(
        lambda: (found := api.batches.retrieve(batch.id)).status == "completed" and found
    )
    assert done.output_file_id is not None
    answers = map(json.loads, api.files.content(done.output_file_id).text.splitlines())
    vectors = [each["response"]["body"]["data"][0]["embedding"] for each in answers]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_job_s_document_has_its_vectors(http: httpx.Client, api: openai.OpenAI) -> None:
    answer = http.post("/v1/score", json={"model": "vectors", "text_1": "w1", "text_2": "w1"})
    document = http.get(f"/v1/jobs/{answer.json()['id']}").json()
    assert document["result"]["scores"] == pytest.approx([1.0])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_the_examples_of_the_documentation_work(http: httpx.Client, path: str) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    for example in document["components"]["schemas"][name]["examples"]:
        answer = http.post(path, json=example)
        assert answer.status_code == 200, answer.text
