"""The bytes of files, in a folder or an object store."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from llorch_worker.contract import shown
from llorch_worker.contract.command_errors import USAGE, CommandError
from llorch_worker.gateway.errors import HttpError, no_space
from llorch_worker.gateway.files.threads import in_thread

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20


class FileStore:
    """Bytes by path, below the ``url`` of a folder. An object is visible to others once a record in
    Redis names it, so what a dying gateway leaves half written harms nobody.

    Methods that are no coroutines block. All raise ``OSError``.
    """

    def __init__(self, url: str) -> None:
        """Raises ``CommandError`` if there is no such kind of store, if its package is missing, or
        if nothing can be written to a folder."""
        try:
            # Other gateways write there too.
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            message = f"LLORCH_GATEWAY_FILES: {error}"
            raise CommandError("INVALID_SETTINGS", message, USAGE) from None
        if isinstance(self._files, LocalFileSystem):
            self._check_folder()

    def _check_folder(self) -> None:
        """Raises ``CommandError`` if nothing can be written there."""
        try:
            os.makedirs(self._root, exist_ok=True)
            with TemporaryFile(dir=self._root):
                pass
        except OSError as error:
            message = (
                f"LLORCH_GATEWAY_FILES: no file can be written to {shown(self._root, 300)} "
                f"({error.strerror}); name a folder where the gateway may write"
            )
            raise CommandError("INVALID_SETTINGS", message, USAGE) from None

    def open(self, path: str) -> BinaryIO:
        file: BinaryIO = self._files.open(self._whole(path), "rb", block_size=BLOCK_BYTES)
        return file

    def write(self, path: str, blocks: Iterable[bytes]) -> int:
        """The number of bytes written. Nothing is left of an object that fails half-way."""
        whole = self._whole(path)
        self._files.makedirs(whole.rpartition("/")[0], exist_ok=True)
        try:
            with self._files.open(whole, "wb") as file:
                return sum(file.write(block) for block in blocks)
        except BaseException:
            with suppress(OSError):
                self._files.rm_file(whole)
            raise

    async def copy_in(self, path: str, source: BinaryIO) -> int:
        """The number of bytes written."""
        return await in_thread(self.write, path, iter(lambda: source.read(BLOCK_BYTES), b""))

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._whole(path))

    def names(self, folder: str) -> list[str]:
        """The paths of the objects in ``folder``."""
        try:
            found: list[Any] = self._files.ls(self._whole(folder), detail=False)
        except FileNotFoundError:
            return []
        return [f"{folder}/{str(path).rpartition('/')[2]}" for path in found]

    def remove_folder(self, folder: str) -> None:
        """Removes ``folder`` if nothing is in it; object stores have none."""
        with suppress(OSError):
            self._files.rmdir(self._whole(folder))

    def _whole(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


async def blocks_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """The whole of ``file``, which is then closed."""
    with file:
        while block := await in_thread(file.read, BLOCK_BYTES):
            yield block


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns errors of the store into ``HttpError``."""
    try:
        yield
    except FileNotFoundError:
        raise HttpError(404, "NOT_FOUND", "no such file", param="id") from None
    except OSError as error:
        if (full := no_space(error)) is not None:
            raise full from None
        logger.warning("503: no file is read or written now: %s", type(error).__name__)
        message = "the store of files does not answer; try again later"
        raise HttpError(503, "FILES_UNAVAILABLE", message) from None
