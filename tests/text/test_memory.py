"""What a tokenizer makes a process hold."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary

LOAD = """
import sys
from pathlib import Path
from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary

load_tokenizer(open_vocabulary(Path(sys.argv[1])))
print(sorted({"sentencepiece", "tokenizers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(("file", "library"), [("f32.gguf", "sentencepiece"), ("hf", "tokenizers")])
def test_only_the_library_of_the_vocabulary_is_imported(
    trained_model: Path, file: str, library: str
) -> None:
    command = [sys.executable, "-c", LOAD, str(trained_model / file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str([library])


def test_python_holds_at_most_20_bytes_a_token(sentencepiece_vocabulary: Path) -> None:
    """Measured: 15. Each token as an object, or its text, takes 50 and more."""
    file = sentencepiece_vocabulary / "vocab-only.gguf"
    load_tokenizer(open_vocabulary(file))  # what is built once
    tracemalloc.start()
    try:
        tokenizer = load_tokenizer(open_vocabulary(file))
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 20 * tokenizer.vocab_size
