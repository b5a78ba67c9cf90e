"""The lines of a file of requests, before anybody looks into them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from llorch_worker.contract.values import UnreadableJson, read_json

BLOCK_BYTES = 2**18
MOST_LINE_BYTES = 8 * 2**20
MOST_LINES = 1_000_000
_ID_BYTES = 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawLine:
    """``number`` counts from 1, as editors do. A line of over ``MOST_LINE_BYTES`` is cut."""

    number: int
    content: bytes


@dataclass(frozen=True)
class Survey:
    """What one look through a file finds."""

    lines: int
    """Those that are not blank."""
    repeated: frozenset[int]
    """The numbers of the lines whose custom_id an earlier line has."""
    broken: frozenset[int]
    """The numbers of the lines that are no JSON objects."""
    digest: str
    """SHA-256 of the file."""


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def raw_lines(blocks: Iterable[bytes]) -> Iterator[list[RawLine]]:
    """The lines that are not blank, as many at a time as end in one block."""
    number, rest = 0, b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield list(_numbered(whole, number))
        number += len(whole)
        rest = rest[: MOST_LINE_BYTES + 1]
    yield list(_numbered([rest], number))


def _numbered(lines: list[bytes], before: int) -> Iterator[RawLine]:
    for number, content in enumerate(lines, start=before + 1):
        if number == 1:
            content = content.removeprefix(BYTE_ORDER_MARK)
        if content.strip():
            yield RawLine(number, content[: MOST_LINE_BYTES + 1])


def survey(file: BinaryIO) -> Survey:
    """Looks through a whole file. Of each custom_id it keeps a digest: it may be as long as a line.

    Raises:
        ValueError: more than ``MOST_LINES`` lines.
    """
    count, seen, repeated, broken = 0, set(), set(), set()
    digest = hashlib.sha256()

    def digested() -> Iterator[bytes]:
        for block in read_blocks(file):
            digest.update(block)
            yield block

    for lines in raw_lines(digested()):
        count += len(lines)
        if count > MOST_LINES:
            raise ValueError(f"a batch may have at most {MOST_LINES} lines")
        for line in lines:
            fields = _fields(line)
            custom_id = None if fields is None else fields.get("custom_id")
            if fields is None:
                broken.add(line.number)
            elif isinstance(custom_id, str):
                # Surrogates may come from escapes.
                data = custom_id.encode(errors="surrogatepass")
                short = hashlib.blake2b(data, digest_size=_ID_BYTES).digest()
                if short in seen:
                    repeated.add(line.number)
                else:
                    seen.add(short)
    return Survey(count, frozenset(repeated), frozenset(broken), digest.hexdigest())


def _fields(line: RawLine) -> dict[str, Any] | None:
    with suppress(UnreadableJson):
        fields = read_json(line.content)
        if isinstance(fields, dict):
            return fields
    return None
