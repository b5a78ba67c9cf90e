"""What is wrong with ``OTEL_*``: OpenTelemetry raises, or logs it and takes a default.

A process whose traces are refused logs one warning and runs without them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import TIMEOUT_MAX
from urllib.parse import urlsplit

from kombu.log import get_logger

from llorch_worker.contract import shown

logger = get_logger(__name__)

_SHOWN_CHARS = 300
_FILES = re.compile(r"OTEL_EXPORTER_OTLP_(TRACES_)?(CLIENT_)?(CERTIFICATE|KEY)")
_URLS = re.compile(r"OTEL_EXPORTER_OTLP_(TRACES_)?ENDPOINT")
_TIMES = re.compile(r"OTEL_BSP_SCHEDULE_DELAY|OTEL_EXPORTER_OTLP_(TRACES_)?TIMEOUT")
# It is not taken.
_DEFAULT = re.compile(r"[.,]? (using|defaulting) .*", re.IGNORECASE)

_refusal: str | None = None
_logged = False


class Refused(Exception):
    """Traces are impossible with these variables: one sentence that names them."""


def refuse(sentence: str, *, log: bool = True) -> None:
    """Ends all tracing of this process, and logs why, once; later if there is no log yet."""
    global _refusal, _logged
    _refusal = _refusal or sentence
    if log and not _logged:
        _logged = True
        logger.warning("no traces: %s", _refusal)


def refusal() -> str | None:
    """Why this process is not traced; None unless it was refused."""
    return _refusal


@contextmanager
def guarded() -> Iterator[None]:
    """Whatever OpenTelemetry raises in the block ends the tracing, and not the block's caller."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - providers, samplers and propagators are anyone's
        refuse(_sentence(error))


@contextmanager
def checking() -> Iterator[None]:
    """Raises :class:`Refused` for what OpenTelemetry raises in the block, or would only log."""
    heard = _Heard()
    library = logging.getLogger("opentelemetry")
    alone = library.propagate
    library.addHandler(heard)
    library.propagate = False
    try:
        yield
    except ModuleNotFoundError:  # the extra is not installed
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise Refused(_sentence(error, *heard.messages)) from None
    finally:
        library.removeHandler(heard)
        library.propagate = alone
    if heard.messages:
        raise Refused(_naming(heard.messages[0]))


def check_values() -> None:
    """Raises :class:`Refused` for what OpenTelemetry finds wrong only when it sends spans."""
    for name, value in _variables().items():
        if _URLS.fullmatch(name) and not _is_http(value):
            raise Refused(f"{_pair(name, value)} is no http:// or https:// URL")
        if _FILES.fullmatch(name) and not os.access(Path(value), os.R_OK):
            raise Refused(f"{_pair(name, value)} is no file that can be read")
        if _TIMES.fullmatch(name) and not _is_time(value):
            raise Refused(f"{_pair(name, value)} is no positive number below {TIMEOUT_MAX:.0f}")
        if not value.isascii() and value != value.encode(errors="replace").decode():
            raise Refused(f"{_pair(name, value)} is not UTF-8")


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_time(value: str) -> bool:
    try:
        return 0 < float(value) < TIMEOUT_MAX
    except ValueError:
        return False


def _sentence(error: Exception, *heard: str) -> str:
    return _naming(str(error) or next(iter(heard), type(error).__name__))


def _naming(message: str) -> str:
    """``message`` with the variables that it is about, and their values."""
    found = _variables()
    message = _DEFAULT.sub("", message)
    named = {name for name in found if _told(name) in message.lower()}
    valued = {name for name, value in found.items() if {*value.split(",")} & {*message.split()}}
    pairs = [_pair(name, found[name]) for name in found if name in (named or valued or found)]
    for name, value in found.items():
        for secret in re.split(r"\s*,\s*", value) if _is_secret(name) else ():
            message = message.replace(secret, "...") if secret else message
    return f"{shown(message.rstrip('.'), _SHOWN_CHARS)} ({', '.join(pairs)})"


def _variables() -> Mapping[str, str]:
    """Those that are set. An empty one is as if it were not."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("OTEL_") and value.strip()
    }


def _told(name: str) -> str:
    """What OpenTelemetry's own sentences call it: OTEL_BSP_MAX_QUEUE_SIZE is max_queue_size."""
    return re.sub("^OTEL_(BSP_|PYTHON_)?", "", name).lower()


def _is_secret(name: str) -> bool:
    return name.endswith("HEADERS")


def _pair(name: str, value: str) -> str:
    if _is_secret(name):
        return f"{name}=..."
    return f"{name}={shown(re.sub('//[^/]*@', '//...@', value))}"
