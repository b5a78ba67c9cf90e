"""What is generated under a schema validates by `jsonschema`, wherever the length let it end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from llorch_worker.engine import Engine
from llorch_worker.engine.generation import Generation
from tests.engine.random_schemas import random_schema
from tests.engine.structured import TIMEOUT_S, asking
from tests.sizes import sized

SCHEMAS = sized(usual=12, full=300)
SEEDS = sized(usual=2, full=4)
AT_ONCE = 16
LEAST_ENDED = 0.8
CHECKED_FORMATS = ("uuid", "ipv4", "email")
"""No pattern knows the leap years: a date may be the 29 February of any year."""


@pytest.fixture(scope="module", params=["demo", "random weights"])
def writer(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = "demo_model" if request.param == "demo" else "random_models"
    path: Path = request.getfixturevalue(name)
    file = path if path.is_file() else path / "f32.gguf"
    with Engine.load(file, device="cpu", dtype="float32", max_sequences=AT_ONCE) as engine:
        yield engine


def test_every_text_that_ended_validates(writer: Engine) -> None:
    running: list[tuple[int, Generation]] = []
    ended = 0
    for number in range(SCHEMAS):
        schema = random_schema(number)
        Draft202012Validator.check_schema(schema)
        for seed in range(SEEDS):
            fields = {"json_schema": {"schema": schema}, "type": "json_schema"}
            request = asking(response_format=fields, seed=seed, max_tokens=400)
            running.append((number, writer.submit(request)))
        while len(running) >= AT_ONCE or (running and number == SCHEMAS - 1):
            ended += validated(*running.pop(0))
    assert ended >= LEAST_ENDED * SCHEMAS * SEEDS


def validated(number: int, generation: Generation) -> bool:
    """Whether the text ended; it must validate then."""
    (choice,) = generation.result(TIMEOUT_S).choices
    if choice.finish_reason != "stop":
        return False
    schema = random_schema(number)
    validator = Draft202012Validator(schema, format_checker=FormatChecker(CHECKED_FORMATS))
    errors = [error.message for error in validator.iter_errors(json.loads(choice.text))]
    assert not errors, f"schema {number}: {json.dumps(schema)} and {choice.text}: {errors}"
    return True
