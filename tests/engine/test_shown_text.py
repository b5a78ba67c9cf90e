"""Stop strings and control tokens are text where that is asked for."""

from __future__ import annotations

from typing import Any

from llorch_worker.contract import GenerationRequest, Tokens
from llorch_worker.engine import Engine


def texts(engine: Engine, **fields: Any) -> tuple[str, str | None]:
    """The text, which is also that of the stream, and the stop string."""
    request = GenerationRequest(prompt="Once upon a time", temperature=0, max_tokens=20, **fields)
    generation = engine.submit(request)
    (choice,) = generation.result(timeout=60).choices
    streamed = [event.text for event in generation.events() if isinstance(event, Tokens)]
    assert "".join(streamed) == choice.text
    return choice.text, choice.stop_string


def test_a_stop_string_is_shown_where_that_is_asked_for(engine: Engine) -> None:
    whole, _ = texts(engine)
    stop = whole[7:11]
    cut = whole[: whole.index(stop)]
    assert texts(engine, stop=stop) == (cut, stop)
    assert texts(engine, stop=stop, include_stop_str_in_output=True) == (cut + stop, stop)


def test_control_tokens_are_shown_where_that_is_asked_for(engine: Engine) -> None:
    begin = engine.tokenizer.bos_token_id
    assert begin is not None
    always = {"logit_bias": {begin: 100.0}, "ignore_eos": True}
    assert texts(engine, **always)[0] == ""
    spelling = engine.tokenizer.token_text(begin)
    assert texts(engine, **always, skip_special_tokens=False)[0] == 20 * spelling
    # The token that ends the answer is never text.
    ended = texts(engine, **always, skip_special_tokens=False, stop_token_ids=[begin])
    assert ended == ("", None)
