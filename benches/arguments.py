"""The command lines of benchmarks that use argparse: types of arguments, and how errors end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import explain


def existing_path(text: str) -> Path:
    """The path of a file or folder that exists."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def whole_number(text: str) -> int:
    """A number from 1 up."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """A list of numbers from 1 up, such as ``1,8,16``."""
    return tuple(whole_number(part.strip()) for part in text.split(","))


@contextmanager
def known_errors() -> Iterator[None]:
    """Ends the program with the sentence and the exit code of a known error, as ``llorch`` does.

    Other errors are defects and propagate."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        explained = explain(error)
        if explained is None:
            raise
        document, code = explained
        Screen().error(document)
        raise SystemExit(code) from None
