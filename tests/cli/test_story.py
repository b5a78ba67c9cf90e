"""How commands print a job's text."""

from __future__ import annotations

import pytest

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.terminal.story import StoryPrinter, outcome
from llorch_worker.contract import Restarted, Tokens
from llorch_worker.contract.result import Choice, GenerationResult, Timings, Usage


def test_a_text_that_begins_again_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    story = StoryPrinter(Screen(), choices=2)
    for event in (
        Tokens(index=0, ids=(1,), text="old"),
        Tokens(choice=1, index=0, ids=(1,), text="void"),
        Restarted(worker="w", attempt=2),
        Tokens(index=0, ids=(1,), text="new"),
    ):
        story.show(event)
    story.end()
    out, err = capsys.readouterr()
    assert err == "the model was replaced: the text begins again\n"
    assert "old\nnew" in out
    assert "void" not in out


THOUGHT = (
    Tokens(index=0, ids=(1,), text="", reasoning_content="hm"),
    Tokens(index=1, ids=(2,), text="", reasoning_content="m"),
    Tokens(index=2, ids=(3,), text="Yes", reasoning_content="."),
    Tokens(index=3, ids=(4,), text="!"),
)


def test_a_thought_is_dimmed_above_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    story = StoryPrinter(Screen())
    for event in THOUGHT:
        story.show(event)
    story.end()
    assert capsys.readouterr().out == "\x1b[2mhmm.\x1b[0m\n\nYes!\n"


def test_an_unfinished_thought_does_not_dim_the_line_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    story = StoryPrinter(Screen())
    story.show(THOUGHT[0])
    story.end()
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[0m\n"


def test_a_pipe_gets_the_answer_without_its_thought(capsys: pytest.CaptureFixture[str]) -> None:
    story = StoryPrinter(Screen())
    for event in THOUGHT:
        story.show(event)
    story.end()
    assert capsys.readouterr().out == "Yes!\n"


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        (1, "30 tokens, 30/s, first after 500 ms, length"),
        (3, "30 tokens, 3 attempts, length"),
    ],
)
def test_the_last_attempts_times_are_not_said_to_be_the_jobs(attempts: int, said: str) -> None:
    result = GenerationResult(
        id="j",
        model="m",
        choices=[Choice(index=0, text="t", token_ids=[], finish_reason="length")],
        usage=Usage(prompt=1, cached=0, completion=30),
        seed=1,
        timings=Timings(queue_ms=400, prefill_ms=100, first_token_ms=500, decode_ms=900),
        worker="w",
        attempts=attempts,
    )
    assert outcome(result) == said
