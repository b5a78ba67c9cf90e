from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.intake.intake import Intake
from llorch_worker.intake.prepared import Limits
from tests.intake.conftest import Vocabulary

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = [{"role": "user", "content": "Zebra"}]


@pytest.fixture(scope="module")
def intake(loaded: Vocabulary) -> Intake:
    size = loaded.tokenizer.vocab_size
    return Intake(loaded.tokenizer, Limits(vocab_size=size, max_context=512, pool_tokens=512))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Zebra", "stop": ["x"], "prediction": "Zebra"},
        {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"},
        {"messages": CHAT, "response_format": {"type": "json_object"}, "n": 2},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_a_prepared_request_holds_no_text_of_its_prompt(
    intake: Intake, fields: dict[str, Any]
) -> None:
    prepared = intake.prepare(GenerationRequest(**fields, max_tokens=8))
    assert "Zebra" not in str(prepared.request.wire())
    assert prepared.request.prompt_token_ids
    # It is still one that a contract allows.
    assert GenerationRequest(**prepared.request.wire()) == prepared.request


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Once upon", "skip_special_tokens": False},
        {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"},
        {"prompt": "Once upon", "structured_outputs": {"regex": "[a-z ]{5,9}"}},
        {"messages": CHAT, "response_format": {"type": "json_object"}, "n": 2},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_an_engine_answers_a_prepared_request_as_the_request_itself(
    demo_model: Any, loaded: Vocabulary, fields: dict[str, Any]
) -> None:
    request = GenerationRequest(**fields, max_tokens=24, seed=7)
    with Engine.load(demo_model, device="cpu", max_context=512) as engine:
        prepared = Intake(loaded.tokenizer, engine.facts.limits).prepare(request)
        # Compiled there, so that the engine has the grammar's document alone.
        prepared = type(prepared).from_document(prepared.document())
        answered = engine.submit(prepared, job_id="a").result(60)
        assert answered.choices == engine.submit(request, job_id="a").result(60).choices


def test_what_prepares_requests_needs_no_torch() -> None:
    code = "import sys, llorch_worker.intake; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
