"""What grammars cost a step of sixteen sequences: filling masks in, applying them, moving on.

    python -m benches.bench_masks

The vocabularies are made up, of random words and punctuation. "behind 0 ms" waits for the masks at
once, as if the model took no time. "behind 5 ms" lets the model's stand-in, which leaves the
processor free as a card does, run first. "processor" is the time of all threads together.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.constraints.compiler import Compiler
from llorch_worker.engine.constraints.masks import MaskedRow, Masker
from llorch_worker.engine.constraints.matcher import Matcher
from llorch_worker.engine.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.decoding_table import DecodingTable, TokenBytes
from llorch_worker.text.tokenizer import Tokenizer

SEQUENCES = 16
STEPS = 300
UNMEASURED_STEPS = 20
EOS_ID = 0
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
PUNCTUATION = " .,:;!?'\"()[]{}<>/=+-*_#\n\t"
SHARE_OF_PUNCTUATION = 0.04
"""About what Llama's vocabularies have: their words are seldom joined to a quotation mark."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["first", "second", "third"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "kind", "tags", "when"],
    "additionalProperties": False,
}


class MadeUpCodec:
    """A vocabulary of all bytes and of random words. It encodes byte by byte."""

    transformers_class = "none"

    def __init__(self, size: int) -> None:
        chance = random.Random(0)
        words = {bytes([byte]): None for byte in range(256)}
        while len(words) < size - 1:
            if chance.random() < SHARE_OF_PUNCTUATION:
                word = "".join(chance.choices(PUNCTUATION, k=chance.randint(2, 4)))
            else:
                letters = "".join(chance.choices(LETTERS, k=chance.randint(2, 8)))
                word = f"{chance.choice(['', ' '])}{letters}"
            words[word.encode()] = None
        tokens = [b"", *words]
        control = {EOS_ID: "</s>"}
        self.special_ids: Mapping[str, int] = {"</s>": EOS_ID}
        self.decoding_table = DecodingTable(
            TokenBytes(tokens), control, False, frozenset(), "replace", False
        )

    def encode(self, text: str, parse_special: bool = False, literal_mark: str = "") -> list[int]:  # noqa: ARG002
        return [byte + 1 for byte in text.encode()]


def measure(vocab_size: int, behind_s: float) -> dict[str, list[float]]:
    """Milliseconds of each step, by part."""
    codec = MadeUpCodec(vocab_size)
    tokenizer = Tokenizer(
        codec,
        prefix_ids=(),
        suffix_ids=(),
        bos_token_id=None,
        eos_token_ids=(EOS_ID,),
        chat=Llama2Chat(codec, None, None),
    )
    stops = frozenset([EOS_ID])
    compiler = Compiler(ConstraintVocabulary(tokenizer, vocab_size, stops), patience_s=60)
    request = GenerationRequest(prompt="a", structured_outputs={"json": SCHEMA})
    beginning = compiler.compile(request)
    assert beginning is not None
    matchers = [beginning.copy() for _ in range(SEQUENCES)]
    masker = Masker(vocab_size, torch.device("cpu"))
    logits = torch.empty(SEQUENCES, vocab_size)
    chance = torch.Generator().manual_seed(0)
    parts = Parts()
    for _ in range(STEPS):
        logits.normal_(generator=chance)
        with parts.time("begin"):
            future = masker.begin([MaskedRow(i, m, stops, True) for i, m in enumerate(matchers)])
        with parts.time("model"):
            time.sleep(behind_s)
        with parts.time("wait"):
            masks = future.result()
        with parts.time("apply"):
            masks.apply(logits)
        chosen = logits.argmax(-1).tolist()
        with parts.time("move on"):
            for index, token_id in enumerate(chosen):
                matchers[index] = moved(matchers[index], token_id, beginning)
    return parts.by_step()


class Parts:
    """How long each part of each step took, and the processor time of all threads meanwhile."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began_s, worked_s = time.perf_counter(), time.process_time()
        yield
        span = (time.perf_counter() - began_s, time.process_time() - worked_s)
        self._spans.setdefault(name, []).append(span)

    def by_step(self) -> dict[str, list[float]]:
        """Milliseconds; "all" is what the steps waited for, and "processor" what others lost."""
        spans = {name: np.array(each) * 1e3 for name, each in self._spans.items()}
        processor = np.sum([each[:, 1] for each in spans.values()], axis=0)
        del spans["model"]
        parts = {name: each[:, 0] for name, each in spans.items()}
        parts |= {"all": np.sum([*parts.values()], axis=0), "processor": processor}
        return {name: each[UNMEASURED_STEPS:].tolist() for name, each in parts.items()}


def moved(matcher: Matcher, token_id: int, beginning: Matcher) -> Matcher:
    """The matcher after a token; at the end, one at the beginning."""
    if token_id == EOS_ID:
        return beginning.copy()
    matcher.push(token_id)
    while matcher.forced and not matcher.complete:
        matcher.push(matcher.forced[0])
    return beginning.copy() if matcher.complete else matcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--behind-ms", type=float, nargs="+", default=[0.0, 5.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for vocab_size in options.vocabularies:
        for behind_ms in options.behind_ms:
            print(f"{vocab_size:,} tokens, {SEQUENCES} sequences, behind {behind_ms:g} ms of model")
            for name, times in measure(vocab_size, behind_ms / 1e3).items():
                p50, p95 = np.percentile(times, [50, 95])
                print(f"  {name:<9} p50 {p50:6.3f} ms   p95 {p95:6.3f} ms")


if __name__ == "__main__":
    main()
