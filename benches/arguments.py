"""Arguments of benchmarks that use argparse, which exits with code 2 for any other."""

from __future__ import annotations

import argparse
from pathlib import Path


def model_path(text: str) -> Path:
    """The path of a file that exists."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def whole_numbers(text: str) -> list[int]:
    """Those of a list such as ``1,8,16``, each at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,8,16")
    return [int(part) for part in parts]
