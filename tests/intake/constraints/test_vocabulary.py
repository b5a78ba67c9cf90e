from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.vocabulary import MOST_FORCED_BYTES, ConstraintVocabulary
from llorch_worker.text import load_tokenizer
from llorch_worker.weights import open_checkpoint

TEXTS = [
    b"Once upon a time",
    b' {"a": [1.5e-3]}\n\t',
    "日本 😀 ünï".encode(),
    b"\xe6\x97",
    b"  two",
]


@pytest.fixture(scope="module", params=["stories.gguf", "stories hf", "random", "llama2", "padded"])
def vocabulary(request: pytest.FixtureRequest) -> ConstraintVocabulary:
    fixture, file = {
        "stories.gguf": ("trained_model", "f32.gguf"),
        "stories hf": ("trained_model", "hf"),
        "random": ("random_models", "f32.gguf"),
        "llama2": ("sentencepiece_vocabulary", "vocab-only.gguf"),
        "padded": ("trained_model", "f32.gguf"),
    }[request.param]
    folder: Path = request.getfixturevalue(fixture)
    tokenizer = load_tokenizer(open_checkpoint(folder / file))
    # A model may have more logits than its vocabulary has tokens.
    size = tokenizer.vocab_size + (67 if request.param == "padded" else 0)
    return ConstraintVocabulary(tokenizer, size, tokenizer.eos_token_ids)


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_the_tokens_of_a_text_have_its_bytes(vocabulary: ConstraintVocabulary, text: bytes) -> None:
    assert b"".join(vocabulary.tokens[token_id] for token_id in vocabulary(text)) == text
    assert vocabulary.spells(text)


def test_forced_text_is_spelt_as_the_tokenizer_spells_it(vocabulary: ConstraintVocabulary) -> None:
    request = GenerationRequest(prompt="a", structured_outputs={"choice": ["Once upon a time"]})
    matcher: Any = Compiler(vocabulary).compile(request)
    ids = []
    while not matcher.complete:
        assert matcher.forced, "there is only one text"
        ids.append(matcher.forced[0])
        matcher.push(matcher.forced[0])
    assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == b"Once upon a time"


@pytest.mark.parametrize(
    "text", ["Once upon a time, ünï 😀. " * 150, "é" * 4_000], ids=["words", "é"]
)
def test_a_long_text_is_spelt_piece_by_piece(vocabulary: ConstraintVocabulary, text: str) -> None:
    request = GenerationRequest(prompt="a", structured_outputs={"choice": [text]})
    matcher: Any = Compiler(vocabulary).compile(request)
    data, pieces = b"", 0
    while not matcher.complete:
        piece = list(matcher.forced)
        spelt = b"".join(vocabulary.tokens[token_id] for token_id in piece)
        assert 0 < len(spelt) <= MOST_FORCED_BYTES
        data, pieces = data + spelt, pieces + 1
        for token_id in piece:
            matcher.push(token_id)
    assert data == text.encode()
    assert pieces > 3


def test_control_tokens_are_no_text(vocabulary: ConstraintVocabulary) -> None:
    request = GenerationRequest(prompt="a", structured_outputs={"regex": "(.|\n)+"})
    matcher: Any = Compiler(vocabulary).compile(request)
    assert vocabulary.special_token_ids
    for token_id in vocabulary.special_token_ids[:-1]:
        with pytest.raises(Exception, match="a token that the grammar does not allow"):
            matcher.copy().push(token_id)


BUILD = """
import sys
from pathlib import Path
import psutil
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.allocator import return_freed_memory
from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary

tokenizer = load_tokenizer(open_vocabulary(Path(sys.argv[1])))
vocabulary = ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
return_freed_memory()
before = psutil.Process().memory_info().rss
Compiler(vocabulary).prepare()
return_freed_memory()
print((psutil.Process().memory_info().rss - before) / tokenizer.vocab_size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_what_grammars_share_takes_at_most_450_bytes_a_token(
    sentencepiece_vocabulary: Path,
) -> None:
    """Measured: 300; with llguidance's own slices, 650."""
    command = [sys.executable, "-c", BUILD, str(sentencepiece_vocabulary / "vocab-only.gguf")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(told.stdout) < 450
