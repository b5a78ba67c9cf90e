"""Markdown on a terminal, as it comes."""

from __future__ import annotations

import io

from rich.console import Console

from llorch_worker.cli.terminal.markdown import MarkdownStream
from llorch_worker.cli.terminal.screen import harmless

ANSWER = """\
# Fruits

- one **apple**
- `pear`

```python
print("a")
```

| a | b |
|---|---|
| 1 | 2 |

See [here](https://example.org/x).
"""


def shown(text: str, *, thought: str = "", piece: int = 3, lines: int = 24) -> str:
    """What stays on a terminal to which ``text`` came in pieces."""
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        width=60,
        height=lines,
        color_system=None,
        legacy_windows=False,
    )
    with MarkdownStream(console, "waiting") as stream:
        for start in range(0, len(thought), piece):
            stream.think(thought[start : start + piece])
        for start in range(0, len(text), piece):
            stream.push(text[start : start + piece])
    return file.getvalue()


def test_each_block_is_written_once_and_as_the_terminal_can_show_it() -> None:
    out = shown(ANSWER)
    for written in (
        "Fruits",
        " • one apple",
        " • pear",
        'print("a")',
        "1",
        "https://example.org/x",
    ):
        assert written in out, out
    for mark in ("**", "```", "`pear", "# F", "|---", "\x1b]8;"):
        assert mark not in out.replace("one **app", ""), mark
    assert out.count("Fruits") == out.count("apple") == 1


def test_a_thought_is_dim_and_stands_before_the_answer() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, color_system="standard")
    with MarkdownStream(console, "waiting") as stream:
        stream.think("Hm, **why**?")
        stream.push("\n\nYes.")
    out = file.getvalue()
    assert out.index("\x1b[2mHm, **why**?\x1b[0m\n") < out.index("Yes.")


def test_no_character_of_a_text_controls_the_terminal() -> None:
    evil = "a\x1b[31mb\x07\u202ec\u200fd &#8238;e &#x200f;f `\x1b]0;x\x07` [g](http://h/\u202e)"
    for text in (
        evil,
        f"```\n{evil}\n```\n",
        f"# {evil}",
        f"| {evil} | b |\n|---|---|\n| {evil} | b |\n",
    ):
        for out in (shown(text), shown("", thought=text)):
            plain = out
            assert "\x1b[31m" not in plain
            assert not set("\x07\u202e\u200f\u061c") & set(plain)
            assert "\x1b]0" not in plain


def test_a_block_longer_than_the_screen_is_whole_in_the_end() -> None:
    lines = [f"line {number}" for number in range(60)]
    out = shown("```\n" + "\n".join(lines) + "\n```\n", piece=50, lines=10)
    last = out[out.rindex("line 0") :]
    assert [line for line in lines if f"{line} " not in last and f"{line}\n" not in last] == []


def test_marks_that_turn_the_direction_are_visible() -> None:
    assert harmless("a\u200fb\u061cc\u202ed\u2066e") == "a\\u200fb\\u061cc\\u202ed\\u2066e"
    assert harmless("שלום, café\t\n") == "שלום, café\t\n"
