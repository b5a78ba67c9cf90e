"""A text that cannot fit is refused before it is tokenised, and none that fits is."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.contract import InvalidRequest, Message
from llorch_worker.contract.token_questions import TokenizeText
from llorch_worker.text import Tokenizer, TooManyTokens, load_tokenizer
from llorch_worker.text.questions import answer

ALL = ("llama2", "llama2_file", "stories", "byte_level")
BOMBS = ["<|" * 500_000, "word " * 200_000, " " * 1_000_000, "\U0001f600" * 250_000, "a" * 10**6]


@pytest.fixture(scope="session", params=ALL)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            [" ", "  ", "\n", "a", "▁", "hello", "<s>", "<|eot_id|>", "<tool>", "\x04", "ﬁ"]
        )
        | st.text(max_size=8)
    ).map("".join),
    named=st.booleans(),
)
def test_no_text_has_fewer_tokens_than_it_is_refused_for(
    tokenizer: Tokenizer, text: str, named: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=named)
    again = tokenizer.encode(text, add_special_tokens=False, parse_special=named, at_most=len(ids))
    assert again == ids


@pytest.mark.parametrize("text", BOMBS, ids=lambda text: repr(text[:2]))
def test_what_cannot_fit_is_never_tokenised(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer._codec, "encode", _fail)
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(text, at_most=4096)
    assert caught.value.at_least > 4096
    turns = [Message(role=role, content=f"x{text[:100_000]}x") for role in ("user", "assistant")]
    with pytest.raises(TooManyTokens):
        tokenizer.encode_chat([*turns * 8, turns[0]], at_most=4096)


def test_a_question_about_more_tokens_than_a_request_may_have_is_refused(
    tokenizer: Tokenizer,
) -> None:
    question = TokenizeText(prompt="\U0010ffff" * 300_000)
    with pytest.raises(InvalidRequest, match="at most 1000000 tokens"):
        answer(tokenizer, question)


def test_a_vocabulary_that_may_shorten_a_text_refuses_none_unread(
    trained_model: Path, tmp_path: Path, source: Any
) -> None:
    definition = json.loads((trained_model / "hf" / "tokenizer.json").read_text())
    text = " " * 100_000
    for changed in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"model": {**definition["model"], "byte_fallback": False}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition | changed))
        load_tokenizer(source(tmp_path)).encode(text, at_most=4)


def test_other_threads_run_while_a_text_is_tokenised(tokenizer: Tokenizer) -> None:
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    interval_s = sys.getswitchinterval()
    # From now on a thread loses Python's lock only where it gives it away.
    sys.setswitchinterval(1_000)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = turns
        tokenizer._codec.encode("word " * 100_000)
        assert turns > before
    finally:
        sys.setswitchinterval(interval_s)
        done.set()
        thread.join()


def _fail(*_: Any, **__: Any) -> list[int]:
    raise AssertionError("it was tokenised")
