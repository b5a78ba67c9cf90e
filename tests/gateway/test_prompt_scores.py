"""Log probabilities of prompts over HTTP: what ``lm_eval --model local-completions`` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker

PATH = "/v1/completions"
TEXTS = ("Once upon a time there was a cat.", "The dog", "Lily liked to play in the park with Tom.")
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def exact_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, trained_model: Path
) -> Iterator[WorkerProcess]:
    """A worker with the real engine in float32."""
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("exact"),
        app=REAL_APP,
        model=trained_model / "hf",
        model_name="exact",
        dtype="float32",
    ) as worker:
        yield worker


@pytest.fixture
def exact(http: httpx.Client, exact_worker: WorkerProcess) -> httpx.Client:
    return http


def scored(http: httpx.Client, **fields: Any) -> list[Any]:
    answer = http.post(PATH, json={"echo": True, "logprobs": 1, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def test_scores_of_prompts_are_those_of_transformers(
    exact: httpx.Client, trained_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained_model / "hf")
    model = AutoModelForCausalLM.from_pretrained(trained_model / "hf", dtype=torch.float32)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    # As lm_eval sends it, and reads it: one token more, which it leaves out.
    choices = scored(exact, prompt=prompts, max_tokens=1, seed=1234)
    for ids, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        assert {len(entries) for entries in found.values()} == {len(ids) + 1}
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        greedy = (expected.argmax(-1) == torch.tensor(ids[1:])).tolist()
        tops = zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
        assert [logprob == max(top.values()) for logprob, top in tops] == greedy


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_text_is_the_prompt_and_its_tokens(exact: httpx.Client, max_tokens: int) -> None:
    for text in TEXTS:
        (choice,) = scored(exact, prompt=text, max_tokens=max_tokens, logprobs=2)
        found = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert len(found["tokens"]) == len(found["token_logprobs"])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            # The first word's token has a space that the text has not.
            spelling = token.removeprefix(" ") if offset == 0 else token
            assert choice["text"][offset:].startswith(spelling)
        if max_tokens == 0:
            assert choice["text"] == text
            assert choice["finish_reason"] == "length"


def test_a_prompt_is_echoed_alone(exact: httpx.Client) -> None:
    (choice,) = scored(exact, prompt=TEXTS[0], max_tokens=0, logprobs=None)
    assert (choice["text"], choice["logprobs"]) == (TEXTS[0], None)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("parse", [True, False])
def test_a_text_is_tokenised_as_it_is_asked_for(
    exact: httpx.Client, trained_model: Path, special: bool, parse: bool
) -> None:
    tokenizer = load_tokenizer(open_vocabulary(trained_model / "hf"))
    fields = {"add_special_tokens": special, "parse_special": parse}
    for text in (TEXTS[0], f"<s>{TEXTS[0]}</s>"):
        ids = tokenizer.encode(text, special, parse)
        (choice,) = scored(exact, prompt=text, max_tokens=1, **fields)
        (expected,) = scored(exact, prompt=ids, max_tokens=1)
        logprobs = [each["logprobs"]["token_logprobs"] for each in (choice, expected)]
        assert logprobs[0] == logprobs[1]
        assert choice["text"].startswith(text)


def test_a_text_whose_tokens_a_client_may_count_otherwise_is_not_scored(
    exact: httpx.Client,
) -> None:
    body = {"prompt": "Once</s>", "echo": True, "logprobs": 1}
    answer = exact.post(PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "parse_special"
    for other in ({"echo": False}, {"logprobs": None}, {"echo": False, "prompt_logprobs": 1}):
        assert exact.post(PATH, json={**body, **other}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "Hi"}], "parse_special": True}
    job = exact.post("/v1/jobs", json=chat)
    assert (job.status_code, job.json()["error"]["param"]) == (400, "parse_special")
