"""An answer says which rules of its schema it breaks."""

from __future__ import annotations

from llorch_worker.contract import Finished
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.chat_answer import chat_completion
from tests.openai_api.test_thoughts import RESULT, USER

UNMET = ("/a: uniqueItems",)


def test_an_answer_and_the_end_of_a_stream_say_what_the_text_breaks() -> None:
    (choice,) = RESULT.choices
    broken = choice.model_copy(update={"unmet": UNMET})
    result = RESULT.model_copy(update={"choices": (broken,)})
    assert chat_completion(result, 0)["choices"][0]["llorch_unmet"] == list(UNMET)
    assert "llorch_unmet" not in chat_completion(RESULT, 0)["choices"][0]

    shape = {"type": "json_object"}
    body = ChatRequest.model_validate(
        {"messages": [USER], "stream": True, "response_format": shape}
    )
    chunks = body.chunks(body.to_requests(), "job", 0)
    assert chunks.needs_results
    finished = Finished(finish_reason="stop", usage=RESULT.usage, timings=RESULT.timings)
    *_, last = chunks.finished(0, finished, result)
    assert last["choices"][0]["llorch_unmet"] == list(UNMET)
