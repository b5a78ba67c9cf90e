"""The command lines of benchmarks that use argparse: types of arguments, and how errors end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llorch_worker.contract.command_errors import explain


def existing_path(text: str) -> Path:
    """The path of a file or folder that exists."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def whole_numbers(text: str) -> list[int]:
    """A list of numbers from 1 up, such as ``1,8,16``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers from 1 up, such as 1,8,16"
        )
    return [int(part) for part in parts]


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
        print(f"error: {document.message}", file=sys.stderr)
        raise SystemExit(code) from None
