"""What a message holds, read within bounds: any producer may have written it."""

from __future__ import annotations

import base64
import json
import zlib
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from kombu.compression import encoders, get_encoder
from kombu.utils.json import object_hook

from llorch_worker.contract import shown
from llorch_worker.contract.plain_objects import TYPED
from llorch_worker.contract.values import UnreadableJson, bound_json

JSON = "application/json"
_PIECE_CHARS = 4 * 2**18
"""A multiple of the four that base64 reads at once."""
_LZMA_BYTES = 2**27
"""Twice what decoding the highest preset takes."""


class Unreadable(Exception):
    """Why nobody can read a message, as a sentence."""


def is_exit(error: BaseException) -> bool:
    """Whether ``error`` ends the process. All others are of a message, whatever their class is:
    kombu's decoders, and those that a producer's library registers, may raise anything."""
    return isinstance(error, SystemExit | KeyboardInterrupt)


def parse(content: bytes, read: Callable[[str], Any] = json.loads) -> Any:
    """``content`` as JSON in UTF-8, counted before it is made.

    Raises:
        UnreadableJson: it holds too much.
        ValueError, RecursionError: it cannot be read.
    """
    # Python would also read UTF-16, in which nothing can be counted by its bytes.
    text = content.decode("utf-8-sig")
    bound_json(content)
    return read(text)


def read_typed(text: str) -> Any:
    """JSON as kombu reads it: dates, decimals, UUIDs and bytes become such.

    What kombu fails on, as on a decimal "x" or a type that it does not know, is an object.
    """
    # Without a hook, objects take half the time.
    return json.loads(text, object_hook=_typed if '"__type__"' in text else None)


def _typed(value: dict[str, Any]) -> Any:
    if value.keys() != TYPED:
        return value
    try:
        return object_hook(value)
    except BaseException as error:
        if is_exit(error):
            raise
        return value


def read_body(
    body: Any, *, encoding: object, compression: object, content_type: object, most_bytes: int
) -> tuple[Any, int]:
    """A message's ``body`` as kombu reads it, and its size in bytes. ``encoding``: its property
    ``body_encoding``; ``compression``: the header.

    Raises:
        Unreadable: it is no JSON, has more than ``most_bytes``, or holds too many values.
    """
    raw = text_of(body, encoding=encoding, compression=compression, most_bytes=most_bytes)
    if content_type != JSON:
        raise Unreadable(f"its content type {shown(content_type)} is not {JSON}")
    return _read(raw), len(raw)


def text_of(body: Any, *, encoding: object, compression: object, most_bytes: int) -> bytes:
    """What :func:`read_body` parses. Raises ``Unreadable``."""
    raw = _as_bytes(body, encoding)
    if compression:
        raw = inflate(raw, compression, most_bytes)
    if len(raw) > most_bytes:
        raise too_large(f"its body has {len(raw)} bytes", most_bytes)
    return raw


def too_large(what: str, most_bytes: int) -> Unreadable:
    """Why a message is refused: ``what`` is a clause that names its size."""
    return Unreadable(f"{what}; at most {most_bytes} are allowed (LLORCH_MAX_MESSAGE_BYTES)")


def _as_bytes(body: Any, encoding: object) -> bytes:
    if body is None:
        body = b""
    if not isinstance(body, str | bytes):
        raise Unreadable("its body is not a string")
    if encoding not in (None, "", "base64", "utf-8"):
        raise Unreadable(f"its body_encoding {shown(encoding)} is not base64 or utf-8")
    try:
        raw = body.encode() if isinstance(body, str) else body
        return _decode_base64(raw) if encoding == "base64" else raw
    except ValueError:
        # Half a surrogate pair, or characters that base64 does not have.
        raise Unreadable(f"its body is not {encoding or 'utf-8'}") from None


def _decode_base64(raw: bytes) -> bytes:
    """In pieces, between which other threads run."""
    try:
        pieces = range(0, len(raw), _PIECE_CHARS)
        return b"".join(a2b_base64(raw[at : at + _PIECE_CHARS], strict_mode=True) for at in pieces)
    except ValueError:
        # Python's ignores line breaks and the like.
        return base64.b64decode(raw)


def _read(raw: bytes) -> Any:
    try:
        return parse(raw, read_typed)
    except UnreadableJson as error:
        raise Unreadable(f"its body {error}") from None
    except UnicodeDecodeError:
        raise Unreadable("its body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"its body is not JSON: see character {error.pos + 1}") from None
    except RecursionError:
        raise Unreadable("its body nests too deep") from None
    except ValueError:
        # Python reads integers of up to 4,300 digits.
        raise Unreadable("its body has an integer of too many digits") from None


# Compression --------------------------------------------------------------------------------------


def inflate(body: bytes, compression: object, most_bytes: int) -> bytes:
    """``body`` without its ``compression``, by any of kombu's names for one.

    Raises:
        Unreadable: it is of another kind or damaged, or inflates to more than ``most_bytes``.
            No more than those are ever made.
    """
    try:
        _, kind = get_encoder(compression)
        decompress = _DECOMPRESS[kind]
    except (LookupError, TypeError):
        known = ", ".join(kind for kind in encoders() if kind in _DECOMPRESS)
        raise Unreadable(f"its compression {shown(compression)} is none of {known}") from None
    try:
        inflated, is_whole = decompress(body, most_bytes + 1)
    except BaseException as error:
        # Each library raises errors of its own.
        if is_exit(error):
            raise
        inflated, is_whole = b"", False
    if len(inflated) > most_bytes:
        raise too_large(f"its body of {len(body)} bytes inflates to more", most_bytes)
    if not is_whole:
        raise Unreadable(f"its body is not {shown(compression)}, or damaged")
    return inflated


def _zlib(body: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = zlib.decompressobj()
    return decompressor.decompress(body, most), decompressor.eof


def _bz2(body: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = import_module("bz2").BZ2Decompressor()
    return decompressor.decompress(body, most), decompressor.eof


def _lzma(body: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = import_module("lzma").LZMADecompressor(memlimit=_LZMA_BYTES)
    return decompressor.decompress(body, most), decompressor.eof


def _brotli(body: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = _first("brotli", "brotlicffi").Decompressor()
    parts = [decompressor.process(body, output_buffer_limit=most)]
    size = len(parts[0])
    while parts[-1] and size < most and not decompressor.is_finished():
        parts.append(decompressor.process(b"", output_buffer_limit=most - size))
        size += len(parts[-1])
    return b"".join(parts), decompressor.is_finished()


def _zstd(body: bytes, most: int) -> tuple[bytes, bool]:
    decompressor = _first("compression.zstd", "backports.zstd").ZstdDecompressor()
    return decompressor.decompress(body, most), decompressor.eof


def _first(*names: str) -> ModuleType:
    """The module that kombu takes, too."""
    for name in names[:-1]:
        with suppress(ImportError):
            return import_module(name)
    return import_module(names[-1])


_DECOMPRESS: Mapping[str, Callable[[bytes, int], tuple[bytes, bool]]] = {
    "application/x-gzip": _zlib,
    "application/x-bz2": _bz2,
    "application/x-lzma": _lzma,
    "application/x-brotli": _brotli,
    "application/zstd": _zstd,
}
"""Decoders by kombu's name. Each takes a body and a number of bytes. It returns at most so many of
the text, makes no more of it, and says whether the body ends."""
