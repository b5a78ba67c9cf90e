"""What a model's files may hold. A wrong number must not take the machine's memory or time.

Each bound is several times what the largest known model has. Files are looked at before they are
read, and what they hold before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.values import JsonBounds

MIB: Final = 2**20


@dataclass(frozen=True)
class Bound:
    """The largest value of a number, and its unit where a field's name does not say it."""

    most: int
    unit: str = ""


TOKENS: Final = Bound(2**20)
"""Of a vocabulary; an id is below it. XLM-V has 901,629, Gemma 3 262,144."""
MERGES: Final = Bound(2**22)
TOKEN_BYTES: Final = Bound(4096, "bytes")
"""Of one token. An answer may repeat the longest."""
TEMPLATE_BYTES: Final = Bound(MIB // 8, "bytes")
"""Of a chat template; gpt-oss has 17 kB. Jinja takes seconds for as much as this."""
TEMPLATES: Final = Bound(64)
PIPELINE_STEPS: Final = Bound(64)
"""Of a tokenizer's normalizer, pre-tokenizer, decoder and post-processor, each."""
INSERTED_BYTES: Final = Bound(256, "bytes")
"""That one step of a tokenizer writes into a text at a place."""
GROWTH: Final = Bound(256, "times its length")
"""Of a text on its way through a tokenizer. NFKC makes up to 11 of one byte, byte-level BPE 2."""
AROUND_TEXT: Final = Bound(64)
"""That a tokenizer puts around a text."""

CONTEXT: Final = Bound(2**27)
NUMBER: Final = Bound(2**31 - 1)
"""Any other number of a configuration."""
ROPE_VALUES: Final = Bound(4096)
TENSORS: Final = Bound(2**18)
"""DeepSeek V3 has 91,991."""
KEYS: Final = Bound(2**16)
"""Of a GGUF header."""
ITEMS: Final = Bound(2**23)
"""In all arrays of a GGUF header: tokens, their scores and types, and merges."""
GGUF_HEADER_BYTES: Final = Bound(100_000_000, "bytes")
SAFETENSORS_HEADER_BYTES: Final = Bound(32 * MIB, "bytes")
"""As JSON takes more memory than it has bytes."""

JSON: Final = JsonBounds(texts=2**23, names=2**23, lists=2**22, items=2**23)
"""Of one file; new versions of tokenizer.json have a list for each merge."""
_FILE_MIB: Final = {
    "config.json": 4,
    "generation_config.json": 1,
    "tokenizer_config.json": 16,
    "special_tokens_map.json": 4,
    "added_tokens.json": 16,
    "tokenizer.json": 64,
    "tokenizer.model": 16,
    "model.safetensors.index.json": 32,
}
"""Files that are read whole. tokenizer.json has 33 MiB with Gemma 3."""


class OutOfBounds(ValueError):
    """A field of a model's files breaks a bound, in words."""


def file_bound(name: str) -> Bound:
    """The most bytes of a file that is read whole, by its name."""
    return Bound(_FILE_MIB[name] * MIB, "bytes") if name in _FILE_MIB else TEMPLATE_BYTES


def check(field: str, found: float, bound: Bound) -> None:
    """Raises :class:`OutOfBounds` if ``found`` is more than ``bound``, or not a number."""
    if not found <= bound.most:
        most = f"{bound.most} {bound.unit}".rstrip()
        raise OutOfBounds(f"{field} is {repr_cut(found)}, but may be at most {most}")


def require(path: Path, field: str, found: float, bound: Bound) -> None:
    """As :func:`check`, as a ModelLoadFailed that names ``path``."""
    try:
        check(field, found, bound)
    except OutOfBounds as error:
        raise ModelLoadFailed(f"{path}: {error}; download or convert it again.") from None


def repr_cut(found: object) -> str:
    """A value of a file for a message, however long it is."""
    try:
        text = repr(found)
    except ValueError:  # more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 50 else f"{text[:50]}…"
