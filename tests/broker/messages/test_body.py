"""A message's body is inflated and read within bounds."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
from kombu.compression import compress, encoders
from kombu.utils.json import dumps

from llorch_worker.broker.messages.body import Unreadable, inflate, read_body, read_typed

ALL = {
    "application/x-gzip", "application/x-bz2", "application/x-lzma", "application/x-brotli",
    "application/zstd",
}  # fmt: skip
CODECS = [
    pytest.param(
        name, marks=pytest.mark.lacks(f"needs {name} in kombu", when=name not in encoders())
    )
    for name in sorted(ALL)
]
MOST = 2**20


def read(body: bytes, most_bytes: int = MOST) -> Any:
    payload, size = read_body(
        body.decode(),
        encoding=None,
        compression=None,
        content_type="application/json",
        most_bytes=most_bytes,
    )
    assert size == len(body)
    return payload


def test_every_codec_of_kombu_has_a_bound() -> None:
    assert set(encoders()) <= ALL


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("text", [b"", b"x", b"[[], {}, {}]" * 1_000, bytes(MOST)], ids=len)
def test_a_body_inflates_as_it_was(codec: str, text: bytes) -> None:
    body, _ = compress(text, codec)
    assert inflate(body, codec, MOST) == text


@pytest.mark.parametrize("codec", CODECS)
def test_a_body_that_inflates_to_more_is_refused_before_it_is_made(codec: str) -> None:
    body, _ = compress(bytes(30 * MOST), codec)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=rf"of {len(body)} bytes inflates to more.*{MOST}"):
            inflate(body, codec, MOST)
        assert tracemalloc.get_traced_memory()[1] < 16 * MOST
    finally:
        tracemalloc.stop()
    with pytest.raises(Unreadable, match="inflates to more"):
        inflate(compress(bytes(MOST + 1), codec)[0], codec, MOST)


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_body_is_refused(codec: str) -> None:
    body, _ = compress(bytes(range(256)) * 8, codec)
    for damaged in (b"", body[:-1], body[: len(body) // 2], b"\0" + body, b"x" * 100):
        with pytest.raises(Unreadable, match="or damaged"):
            inflate(damaged, codec, MOST)


@pytest.mark.parametrize("name", ["lz4", "", 7, None, [], {"gzip": 1}, "GZIP"])
def test_another_compression_is_refused_with_those_that_there_are(name: object) -> None:
    with pytest.raises(Unreadable, match="is none of application/x-gzip, application/x-bz2"):
        inflate(b"x", name, MOST)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("values", [7] * 1_200_000),
        ("objects and lists", [[]] * 110_000),
        ("objects and lists", [{}] * 110_000),
        ("names and texts", dict.fromkeys(map(str, range(250_000)), 0)),
        ("names and texts", [""] * 250_000),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_made(what: str, value: Any) -> None:
    with pytest.raises(Unreadable, match=rf"its body must hold at most \d+ {what}"):
        read(json.dumps([[], {"x": value}, {}]).encode(), most_bytes=32 * MOST)


@pytest.mark.parametrize("value", [[7] * 1_000_000, "[{,:" * 300_000, '"\\' * 300_000], ids=type)
def test_a_long_prompt_is_read(value: Any) -> None:
    body = [[], {"x": value}, {}]
    assert read(json.dumps(body).encode(), most_bytes=32 * MOST) == body


def test_json_that_python_reads_is_read() -> None:
    for text, value in {
        "NaN": math.nan, "-Infinity": -math.inf, "1e999": math.inf, "[1, 1]": [1, 1],
        '{"a": 1, "a": 2}': {"a": 2}, '"\\ud800"': "\ud800", "1" * 4_300: int("1" * 4_300),
    }.items():  # fmt: skip
        found = read(text.encode())
        assert found == value or (math.isnan(found) and math.isnan(value))


def test_what_kombu_cannot_decode_is_an_object() -> None:
    for kind in ("decimal", "bytes", "uuid", "datetime", "unheard of", None, [], {}):
        for value in ("x", None, 7, [], {"hex": 5}):
            written = {"a": [{"__type__": kind, "__value__": value}]}
            if (kind, value) not in (("bytes", "x"), ("decimal", 7)):
                assert read_typed(dumps(written)) == written
    assert read_typed(dumps({"a": b"x"})) == {"a": b"x"}
