"""The answers of a batch, in parts that are each written once, and its files made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Literal, NamedTuple

from llorch_worker.gateway.batches.record import BatchRecord, Counts, Part
from llorch_worker.gateway.files.record import FileRecord, new_file_id
from llorch_worker.gateway.files.store import BLOCK_BYTES, FileStore
from llorch_worker.gateway.files.threads import in_thread

PART_LINES = 1_000
PART_BYTES = 16 * 2**20
PART_S = 60.0
"""A part is written once it has this many lines or bytes, or once its first answer is this old."""

FileKind = Literal["output", "error"]
KINDS: Final[tuple[FileKind, ...]] = ("output", "error")


class Written(NamedTuple):
    """An answer, as a line of a file."""

    line: bytes
    failed: bool


class PartWriter:
    """Collects answers in order. ``written`` is awaited with each part that is complete on disk.

    Names of parts begin with the driver's ``token``, so a driver that lost its lease overwrites
    nothing. Answers that are in no part when a driver dies are made again from the jobs' results.
    """

    def __init__(
        self,
        store: FileStore,
        folder: str,
        token: str,
        written: Callable[[Part], Awaitable[None]],
    ) -> None:
        self._store = store
        self._folder = folder
        self._token = token
        self._written = written
        self._lock = asyncio.Lock()
        self._count = 0
        self._clear()

    def _clear(self) -> None:
        self.counts = Counts()
        """Of the answers that are in no part yet."""
        self._lines: dict[FileKind, list[bytes]] = {"output": [], "error": []}
        self._bytes = 0
        self._since_s = time.monotonic()

    async def add(self, answer: Written) -> None:
        async with self._lock:
            if not self.counts.total:
                self._since_s = time.monotonic()
            line, failed = answer
            self._lines["error" if failed else "output"].append(line)
            self._bytes += len(line)
            self.counts.total += 1
            self.counts.failed += failed
            self.counts.completed += not failed
            if self.counts.total >= PART_LINES or self._bytes >= PART_BYTES:
                await self._write()

    async def write_if_old(self) -> None:
        if self.counts.total and time.monotonic() - self._since_s > PART_S:
            await self.write()

    async def write(self) -> None:
        """Writes what there is."""
        async with self._lock:
            if self.counts.total:
                await self._write()

    async def _write(self) -> None:
        name = f"{self._token}-{self._count}"
        self._count += 1
        sizes = {
            kind: await in_thread(self._store.write, part_path(self._folder, name, kind), lines)
            if lines
            else 0
            for kind, lines in self._lines.items()
        }
        part = Part(
            name=name,
            counts=self.counts,
            output_bytes=sizes["output"],
            error_bytes=sizes["error"],
        )
        self._clear()
        await self._written(part)


def part_path(folder: str, name: str, kind: FileKind) -> str:
    return f"{folder}/{name}.{kind}"


def joined(
    store: FileStore, record: BatchRecord, token: str, kind: FileKind, keep_s: int
) -> FileRecord | None:
    """Writes the batch's output or error file, to be kept for ``keep_s``; None if it would be
    empty. Blocks."""
    names = [
        part.name
        for part in record.parts
        if (part.output_bytes if kind == "output" else part.error_bytes)
    ]
    if not names:
        return None

    def blocks() -> Iterator[bytes]:
        for name in names:
            with store.open(part_path(record.folder, name, kind)) as part:
                yield from iter(lambda: part.read(BLOCK_BYTES), b"")

    path = f"{record.folder}/{token}.{kind}"
    now_s = int(time.time())
    return FileRecord(
        id=new_file_id(),
        owner=record.owner,
        created_at=now_s,
        expires_at=now_s + keep_s,
        filename=f"{record.id}_{kind}.jsonl",
        purpose="batch_output",
        bytes=store.write(path, blocks()),
        path=path,
    )


def remove_parts(store: FileStore, record: BatchRecord, kept: list[str]) -> None:
    """Removes everything of a batch that has ended but the ``kept`` paths. Blocks."""
    for path in store.names(record.folder):
        if path not in kept:
            store.remove(path)
    if not kept:
        store.remove_folder(record.folder)
