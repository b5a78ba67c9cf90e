"""The vocabulary's part of the plan is what a process then holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llorch_worker.engine.memory.load_plan import (
    GRAMMAR_BYTES,
    TOKENIZERS_BYTES,
    UNIGRAM_BYTES,
    vocabulary_bytes,
)
from llorch_worker.intake.constraints.compiler import LARGE_VOCABULARY
from llorch_worker.text.vocabulary_file import VocabularyFile

MEASURE = """
import gc, itertools, string, sys
from pathlib import Path
import psutil
from llorch_worker.allocator import return_freed_memory
from llorch_worker.engine import Engine
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.engine.memory.load_plan import vocabulary_bytes
from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import VocabularyFile

def resident():
    gc.collect()
    return_freed_memory()
    return psutil.Process().memory_info().rss

def source(kind, number):
    letters = string.ascii_lowercase
    words = {
        length: ["".join(word) for word in itertools.product(letters, repeat=length)]
        for length in (2, 4)
    }
    merges = [f"{word[0]} {word[1]}" for word in words[2]]
    merges += [f"{word[:2]} {word[2:]}" for word in words[4]]
    merged = [merge.replace(" ", "") for merge in merges][:number]
    bytes_ = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [*map(chr, bytes_), *(chr(0x100 + i) for i in range(256 - len(bytes_)))]
    tokens = ["<s>", *alphabet, *merged]
    types = [3] + [1] * (len(tokens) - 1)
    if kind == "t5":
        # Dense words share too much of a trie.
        tokens[1:] = [f"{token}{at % 97:02}" for at, token in enumerate(tokens[1:])]
    if kind != "gpt2":
        tokens[:0], types[:0] = ["<unk>"], [2]
    return VocabularyFile(Path("a.gguf"), "gguf", {
        "general.architecture": "bert" if kind == "t5" else "llama",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<s>"),
        # Of no characters.
        "tokenizer.ggml.precompiled_charsmap": [0, 4, 0, 0] + [0] * 1024,
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges[:number] if kind == "gpt2" else [],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
    })

def load(kind, number):
    file = source(kind, number)
    before = resident()
    tokenizer = load_tokenizer(file)
    vocabulary = ConstraintVocabulary(tokenizer, tokenizer.vocab_size, frozenset())
    vocabulary.ll_tokenizer
    return resident() - before, vocabulary_bytes(file, tokenizer.vocab_size)

load(sys.argv[1], 1000)  # what the libraries take once
print(*load(sys.argv[1], 75_000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators return memory otherwise")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_the_plan_of_a_large_vocabulary_is_what_the_process_takes(kind: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, kind], capture_output=True, text=True, check=True
    )
    measured, planned = map(int, run.stdout.split())
    assert 0.6 < measured / planned < 1.3, f"{measured:,} measured, {planned:,} planned"


@pytest.mark.parametrize(
    ("vocab", "each"),
    [
        ([["<s>", 0.0], ["a", -1.0]], UNIGRAM_BYTES),
        ({"<s>": 0, '"vocab":[': 1}, TOKENIZERS_BYTES),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_folders_kind_of_vocabulary_is_its_own_and_not_its_graphs(
    tmp_path: Path, vocab: object, each: int, separators: tuple[str, str]
) -> None:
    """multilingual-e5-small is a BERT with XLM-RoBERTa's vocabulary."""
    definition = {"added_tokens": [], "model": {"unk_id": 0, "vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition, separators=separators))
    file = VocabularyFile(tmp_path, "hugging_face", {"model_type": "bert"})
    assert vocabulary_bytes(file, 1000) == 1000 * each
    size = LARGE_VOCABULARY
    assert vocabulary_bytes(file, size, generates=False) == size * each
    assert vocabulary_bytes(file, size) == size * (each + GRAMMAR_BYTES)
