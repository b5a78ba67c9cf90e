"""Bearer keys: who may call, how much, and with which priority."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llorch_worker.contract import Priority, shown
from llorch_worker.contract.command_errors import USAGE, CommandError, usage_error
from llorch_worker.contract.rules import rule_of
from llorch_worker.gateway.webhook_secret import WebhookSecret, new_secret

logger = logging.getLogger(__name__)

KEY_PREFIX = "llorch-"
_KEY_BYTES = 32
_MOST_NAME_CHARS = 100
WINDOWS_MS = {"minute": 60_000, "day": 86_400_000}
MOST_A_WINDOW = 10**12


@dataclass(frozen=True)
class Rate:
    """At most ``limit`` requests or tokens at once, and as many again in each window, evenly."""

    name: str
    """What Redis calls it: ``tokens_minute``. ``tokens``, before the first mark, is its kind."""
    limit: int
    window_ms: int

    @property
    def kind(self) -> str:
        return self.name.partition("_")[0]


@dataclass(frozen=True)
class Caller:
    """Who sent a request. ``name`` is "" if the gateway asks for no keys."""

    name: str = ""
    max_jobs: int | None = None
    """The most jobs in flight."""
    rates: tuple[Rate, ...] = ()
    soft: bool = False
    """Whether jobs beyond the limits run with the lowest priority instead of being refused."""
    priority: Priority | None = None
    """The priority of requests that give none."""
    operator: bool = False
    """Whether the console shows it the fleet, everyone's jobs and the dead letters."""
    standing: dict[str, str] = field(default_factory=dict, compare=False)
    """Headers of the answer, once its limits were looked at."""


class _Key(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=_MOST_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    max_jobs: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1, le=MOST_A_WINDOW)
    requests_per_day: int | None = Field(None, ge=1, le=MOST_A_WINDOW)
    tokens_per_minute: int | None = Field(None, ge=1, le=MOST_A_WINDOW)
    tokens_per_day: int | None = Field(None, ge=1, le=MOST_A_WINDOW)
    soft: bool = False
    priority: Priority | None = None
    operator: bool = False
    webhook_secret: WebhookSecret | None = None
    """Signs the webhooks of its jobs."""

    @cached_property
    def rates(self) -> tuple[Rate, ...]:
        limits = (
            (f"{kind}_{window}", getattr(self, f"{kind}_per_{window}"), ms)
            for kind in ("requests", "tokens")
            for window, ms in WINDOWS_MS.items()
        )
        return tuple(Rate(name, limit, ms) for name, limit, ms in limits if limit is not None)

    def caller(self) -> Caller:
        return Caller(self.name, self.max_jobs, self.rates, self.soft, self.priority, self.operator)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[_Key, ...] = ()


class KeyRing:
    """The keys of a file. A changed file counts from the next request on, so a key is revoked by
    deleting its entry; a file that has become unreadable changes nothing."""

    def __init__(self, path: Path) -> None:
        """Raises ``CommandError`` if the file cannot be read or breaks a rule."""
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = _read(path)

    def caller(self, key: str) -> Caller | None:
        """Whose key this is; None if nobody's."""
        self._refresh()
        digest = key_digest(key)
        found = None
        # All of them, so that the time says nothing about a key.
        for each in self._keys:
            if hmac.compare_digest(each.sha256, digest):
                found = each.caller()
        return found

    def named(self, name: str) -> Caller | None:
        """The one whose key has this name."""
        self._refresh()
        return next((each.caller() for each in self._keys if each.name == name), None)

    def webhook_secret(self, name: str) -> str | None:
        """What signs the webhooks of the key with this name."""
        self._refresh()
        found = [each.webhook_secret for each in self._keys if each.name == name]
        return next((each.get_secret_value() for each in found if each is not None), None)

    def _refresh(self) -> None:
        # Before the file: one that changes again meanwhile is read again.
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read(self._path)
        except CommandError as error:
            logger.error("the keys stay as they were: %s", error)

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def key_digest(key: str) -> str:
    """What the file holds of a key. The keys are random, so a plain hash cannot be guessed."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(name: str) -> tuple[str, str]:
    """A new key, and its entry for the file, with a secret for its webhooks.

    Raises ``CommandError`` for a name that the file may not hold.
    """
    key = f"{KEY_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"
    entry = {"name": name, "sha256": key_digest(key), "webhook_secret": new_secret()}
    try:
        _Key.model_validate(entry)
    except ValidationError:
        raise usage_error(
            f"a key's name must be 1 to {_MOST_NAME_CHARS} of A-Za-z0-9._-, not '{shown(name)}'"
        ) from None
    lines = [f'{field} = "{value}"\n' for field, value in entry.items()]
    return key, "".join(["[[keys]]\n", *lines])


def _read(path: Path) -> tuple[_Key, ...]:
    try:
        # Editors of Windows begin a file with a byte order mark.
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig"))).keys
    except (OSError, ValueError) as error:
        if isinstance(error, ValidationError):
            reason = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {rule_of(each)}" for each in error.errors()
            )
        elif isinstance(error, UnicodeDecodeError):
            reason = "is not UTF-8; save it as UTF-8"
        else:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
        message = f"the file of keys {path}: {reason}"
        raise CommandError("INVALID_SETTINGS", message, USAGE) from None
