"""The header of a GGUF file: key/values and the table of tensors.

``gguf.GGUFReader`` would build an array object for each vocabulary entry, and raises arbitrary
exceptions for a damaged file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.bounds import GGUF_HEADER_BYTES, ITEMS, KEYS, TENSORS, require
from llorch_worker.model_files.model_file import ModelFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MIN_ENTRY_BYTES = 13
"""The smallest key/value pair or tensor entry: bounds the counts of a damaged header."""

_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4"}
_SCALARS |= {10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensorEntry:
    """``shape`` is row-major, reversed from the file; ``offset`` counts from ``data_start``."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    entries: tuple[GgufTensorEntry, ...]
    data_start: int


def read_gguf_header(file: ModelFile) -> GgufHeader:
    """Parse the header; raises ModelLoadFailed if the file is damaged or not GGUF."""
    return _HeaderReader(file).header()


class _HeaderReader:
    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._at = 0
        self._items = 0
        """In the arrays so far."""

    def header(self) -> GgufHeader:
        if self._file.read(0, 4) != _MAGIC:
            raise ModelLoadFailed(
                f"{self._file.path} is not a GGUF file (it does not begin with 'GGUF'); "
                "give a .gguf file or a Hugging Face model folder."
            )
        self._at = 4
        version = self._uint32()
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "is big-endian" if swapped in _VERSIONS else f"has GGUF version {version}"
            raise ModelLoadFailed(
                f"{self._file.path} {what}, but only little-endian versions 2 and 3 can be read; "
                "convert it with a current converter."
            )
        tensor_count, pair_count = self._uint64(), self._uint64()
        if (tensor_count + pair_count) * _MIN_ENTRY_BYTES > self._file.size_bytes:
            raise self._damaged(
                f"its header announces {tensor_count} tensors and {pair_count} key/values"
            )
        require(self._file.path, "the number of tensors", tensor_count, TENSORS)
        require(self._file.path, "the number of key/values", pair_count, KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._uint32())
        entries = tuple(self._entry() for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"its alignment is {alignment!r}")
        return GgufHeader(metadata, entries, -(-self._at // alignment) * alignment)

    def _entry(self) -> GgufTensorEntry:
        name = self._string()
        dimensions = self._uint32()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._uint64() for _ in range(dimensions))[::-1]
        return GgufTensorEntry(name, shape, self._uint32(), self._uint64())

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _BOOL:
            return self._take(1) != b"\0"
        if type_id == _ARRAY:
            item_type, count = self._uint32(), self._uint64()
            return self._array(item_type, count)
        return self._array(type_id, 1)[0]

    def _array(self, item_type: int, count: int) -> list[Any]:
        if count > self._file.size_bytes:
            raise self._damaged(f"an array announces {count} items")
        self._items += count
        require(self._file.path, "the number of items in its arrays", self._items, ITEMS)
        if item_type in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item_type])
            items: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            return items
        if item_type == _BOOL:
            return [item != 0 for item in self._take(count)]
        if item_type == _STRING:
            return [self._string() for _ in range(count)]
        raise self._damaged(f"a value has the unknown type {item_type}")

    def _string(self) -> str:
        # Vocabularies may hold bytes that are not UTF-8; they are kept as surrogates.
        return self._take(self._uint64()).decode("utf-8", "surrogateescape")

    def _uint32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _uint64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, length: int) -> bytes:
        if length > self._file.size_bytes - self._at:
            raise self._damaged("its header runs past the end of the file")
        # Wrong counts in a large file would else take all memory.
        require(self._file.path, "the size of its header", self._at + length, GGUF_HEADER_BYTES)
        piece = self._file.read(self._at, length)
        self._at += length
        return piece

    def _damaged(self, what: str) -> ModelLoadFailed:
        return ModelLoadFailed(
            f"{self._file.path} is truncated or damaged ({what}); download or convert it again."
        )
