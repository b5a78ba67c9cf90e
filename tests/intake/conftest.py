from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary


@dataclass(frozen=True)
class Vocabulary:
    path: Path
    tokenizer: Tokenizer


@pytest.fixture(scope="session")
def loaded(demo_model: Path) -> Vocabulary:
    """The demo model's."""
    return Vocabulary(demo_model, load_tokenizer(open_vocabulary(demo_model)))
