"""A model as an argument of a benchmark that uses argparse."""

from __future__ import annotations

import argparse
from pathlib import Path


def model_path(text: str) -> Path:
    """The path of a model that exists; argparse ends the program with exit code 2 otherwise."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path
