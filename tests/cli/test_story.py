"""How commands print a job's text."""

from __future__ import annotations

import pytest

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.terminal.story import StoryPrinter
from llorch_worker.contract import Restarted, Tokens


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
