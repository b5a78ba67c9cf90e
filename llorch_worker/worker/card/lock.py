"""Card locks: a locked file for each taken card, so that a card has one worker.

The kernel holds the lock (``flock``) until the process ends for any reason. Containers that share
cards must share the folder, as a volume. The package ``filelock`` would unlock when its object is
collected, and without ``flock`` it falls back to a lock that outlives its process.
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
"""Held while a process takes or inspects a card's lock. Inspecting takes the lock for a moment,
which must not make the card look taken to others."""
_SHARED_FOLDER = 0o1777
_SHARED_FILE = 0o666


class Holder(BaseModel):
    """The holder of a card, from its lock file; ``pid`` is a process of ``host``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.worker} (process {self.pid} of {self.host})"


class CardLocks:
    """The locks of all workers that share ``folder``, which is created if missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, card: Card, holder: Holder) -> int | None:
        """Locks ``card`` until this process ends, and each that inherits the descriptor which this
        returns. None if another process has it.

        Raises:
            DeviceUnavailable: the folder is not writable.
        """
        try:
            with self._guarded():
                descriptor = self._try_lock(card)
                if descriptor is None:
                    return None
                os.ftruncate(descriptor, 0)
                os.write(descriptor, holder.model_dump_json().encode())
                # Closing it would unlock the card.
                return descriptor
        except OSError as error:
            raise DeviceUnavailable(
                f"cannot use the folder of device locks {self._folder} ({error.strerror}); "
                "set LLORCH_DEVICE_LOCKS to one that every worker of this machine can write"
            ) from None

    def holder(self, card: Card) -> Holder | None:
        """The current holder of ``card``, if any. Creates no folder and no file.

        Raises:
            OSError: the folder exists but is not readable.
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
        # With O_CREAT the kernel refuses another user's file in a sticky folder.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, _SHARED_FILE)
        with suppress(PermissionError):
            os.fchmod(descriptor, _SHARED_FILE)  # independent of the umask
        return descriptor
