"""One worker a card: a locked file for each card that is taken.

The lock is the kernel's (``flock``), so it goes with its process, however that ends. Containers
share cards and not process ids, so the folder is what they have to share: a volume.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from llorch_worker.devices import Card, DeviceUnavailable

GUARD = "guard.lock"
"""Held for the moment in which somebody tries or looks at the cards' locks: who looks at a lock has
to take it, and must not be what another finds it taken by."""
_SHARED_FOLDER = 0o1777
_SHARED_FILE = 0o666


class Holder(BaseModel):
    """Who has a card, as written into its lock file; ``pid`` is one of ``host``'s."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.worker} (process {self.pid} of {self.host})"


class CardLock:
    """A card that is this process' own, until :meth:`release` or its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the card up; nothing of this process may use it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CardLocks:
    """The locks of all workers that share ``folder``, which is made where it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, card: Card, holder: Holder) -> CardLock | None:
        """The lock of ``card``, now ours; None where another has it.

        Raises:
            DeviceUnavailable: the folder cannot be written.
        """
        try:
            with self._guarded():
                descriptor = self._try_lock(card)
                if descriptor is None:
                    return None
                os.ftruncate(descriptor, 0)
                os.write(descriptor, holder.model_dump_json().encode())
                return CardLock(descriptor)
        except OSError as error:
            raise DeviceUnavailable(
                f"the folder of device locks {self._folder} cannot be used ({error.strerror}); "
                "set LLORCH_DEVICE_LOCKS to one that every worker of this machine can write"
            ) from None

    def holder(self, card: Card) -> Holder | None:
        """Who holds ``card`` now. Only looks: makes no folder and no file.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        path = self._path(card)
        if not path.exists():
            return None
        with self._guarded():
            descriptor = self._try_lock(card)
            if descriptor is not None:
                os.close(descriptor)
                return None
            try:
                return Holder.model_validate_json(path.read_text())
            except ValidationError:
                return Holder(worker="another program", host="this machine", pid=0)

    def _try_lock(self, card: Card) -> int | None:
        descriptor = _open(self._path(card))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):
                self._folder.chmod(_SHARED_FOLDER)
        descriptor = _open(self._folder / GUARD)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _path(self, card: Card) -> Path:
        return self._folder / f"{card.uuid or card.name}.lock"


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Without O_CREAT: with it the kernel refuses another user's file in a sticky folder.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, _SHARED_FILE)
        with suppress(PermissionError):
            os.fchmod(descriptor, _SHARED_FILE)  # whatever the umask
        return descriptor
