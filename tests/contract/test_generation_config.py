from __future__ import annotations

from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.generation_config import checked, with_generation_config

CONFIG = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def sent(config: dict[str, Any] = CONFIG, **fields: Any) -> dict[str, Any]:
    request = with_generation_config(GenerationRequest(prompt="x", **fields), config)
    return {name: value for name, value in request.wire().items() if name != "prompt"}


def test_what_a_request_does_not_name_is_as_the_makers_have_it() -> None:
    assert sent() == {**CONFIG, "generation_config": [*CONFIG]}
    found = sent(top_p=1.0, temperature=0.9)
    assert found == {
        "temperature": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "generation_config": ["top_k", "repetition_penalty"],
    }
    assert sent({}) == {}


def test_a_greedy_request_takes_what_matters_to_it() -> None:
    assert sent(temperature=0) == {
        "temperature": 0,
        "repetition_penalty": 1.05,
        "generation_config": ["repetition_penalty"],
    }


def test_a_makers_maximum_is_cut_to_the_context_and_not_below_a_minimum() -> None:
    assert sent({"max_tokens": 9}) == {
        "max_tokens": 9,
        "cut_max_tokens": True,
        "generation_config": ["max_tokens"],
    }
    assert sent({"max_tokens": 9}, min_tokens=12)["max_tokens"] == 12
    assert sent({"max_tokens": 9}, max_tokens=256) == {"max_tokens": 256}


def test_what_was_taken_once_is_not_taken_again() -> None:
    once = with_generation_config(GenerationRequest(prompt="x"), CONFIG)
    again = with_generation_config(once, {**CONFIG, "temperature": 0.1})
    assert again == once
    assert GenerationRequest(**once.wire()).taken_config == CONFIG


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"temperature": 3.5, "top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 0}, {}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"temperature": True, "min_p": "0.1", "repetition_penalty": [1]}, {}),
        ({"temperature": float("nan"), "prompt": "y", "seed": 1}, {}),
    ],
)
def test_only_what_a_request_may_have_is_taken(
    given: dict[str, Any], valid: dict[str, Any]
) -> None:
    assert checked(given)[0] == valid
