"""Checks what a tokenizer.json holds before a library reads it.

The steps of its pipeline rewrite every text, so their growth multiplies: forty that double a text
make a terabyte of one letter.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llorch_worker.model_files.bounds import (
    AROUND_TEXT,
    GROWTH,
    INSERTED_BYTES,
    MERGES,
    PIPELINE_STEPS,
    TOKEN_BYTES,
    TOKENS,
    check,
    repr_cut,
)

_COMPONENTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
"""Parts of the pipeline, and the key of each one's steps."""
_LARGE = {"pattern": TOKEN_BYTES, "precompiled_charsmap": None}
"""Strings of a step that are not written into a text, with their bounds."""
_GROWTH = {
    "NFD": 3.0,
    "NFC": 3.0,
    "NFKD": 11.0,
    "NFKC": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 8.0,
}
"""By how much a step may lengthen a text in UTF-8, as Unicode's tables have it."""
_NFKC_BYTES = 33
"""Of what NFKC makes of three bytes: the longest in the maps that sentencepiece trains with."""
_BLOCK_NODES = 256
_HAS_LEAF = 0x100
"""Of darts-clone's tries: the nodes are in whole blocks; the flag of a node with a leaf."""


def check_definition(definition: Mapping[str, Any]) -> int:
    """The number of ids. Raises ValueError, with the field, for what breaks one of the bounds."""
    model = definition["model"]
    vocabulary = model["vocab"]
    tokens = vocabulary if isinstance(vocabulary, dict) else [entry[0] for entry in vocabulary]
    added = definition.get("added_tokens") or []
    check("tokenizer.json: the number of tokens", len(tokens) + len(added), TOKENS)
    check("tokenizer.json: the number of merges", len(model.get("merges") or ()), MERGES)
    ids: list[int] = [token["id"] for token in added]
    if isinstance(vocabulary, dict) and vocabulary:
        found = vocabulary.values()
        # Only numbers have a least one.
        ids += [min(found), max(found)] if set(map(type, found)) == {int} else found
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(
                f"tokenizer.json has the id {repr_cut(token_id)}, which is no token id"
            )
        check("tokenizer.json: a token's id", token_id, TOKENS)
    check_tokens((*tokens, *(token["content"] for token in added)))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        check(f"tokenizer.json: the length of {name}", _size(model.get(name)), INSERTED_BYTES)
    growth = 1.0
    for component, key in _COMPONENTS.items():
        field = f"tokenizer.json: {component}"
        steps = list(_steps(definition.get(component), key, field))
        for step in steps:
            _check_strings(f"{field}.{step['type']}", step)
        if component in ("normalizer", "pre_tokenizer"):
            for step in steps:
                growth *= max(1.0, _growth(step))
    check("tokenizer.json: the growth of a text in its pipeline", math.ceil(growth), GROWTH)
    return max((len(tokens) - 1, *ids)) + 1


def check_tokens(tokens: Iterable[str]) -> None:
    """Raises ValueError if one of them is too long."""
    longest = max(tokens, key=_size, default="")
    check(f"the length of the token {longest[:20]!r}", _size(longest), TOKEN_BYTES)


def check_charsmap(charsmap: bytes) -> float:
    """By how much a text may grow by a map of sentencepiece: a trie's bytes, and what it maps to.

    Raises ValueError if that is out of bounds, or if the trie leads to where nothing begins, where
    the libraries would fail with some text.
    """
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    trie, written = charsmap[4 : 4 + trie_bytes], charsmap[4 + trie_bytes :]
    nodes = struct.unpack(f"<{len(trie) // 4}I", trie[: len(trie) // 4 * 4])
    whole = trie_bytes == 4 * len(nodes)
    # Without a map nothing is changed.
    if charsmap and not (whole and _is_sound(nodes, written)):
        raise ValueError("the map of characters in its normalizer is damaged")
    longest = max(map(len, written.split(b"\0")), default=0)
    check("the length of what its normalizer writes", longest, INSERTED_BYTES)
    return _GROWTH["NFKC"] if longest <= _NFKC_BYTES else float(longest)


def _is_sound(nodes: Sequence[int], written: bytes) -> bool:
    """Whether a trie of darts-clone leads nowhere but to nodes and to beginnings of characters."""
    # A byte of a text leads to any node of a block.
    if not nodes or len(nodes) % _BLOCK_NODES:
        return False
    for at, node in enumerate(nodes):
        # A leaf says where its text is, another node where its children are. One of these may be a
        # leaf, which it says as well.
        if node >> 31:
            to = node & 0x7FFFFFFF
            if to >= len(written) or written[to] & 0xC0 == 0x80:
                return False
        else:
            to = at ^ (node >> 10) << ((node >> 6) & 8)
            if to >= len(nodes) or (node & _HAS_LEAF and not nodes[to] >> 31):
                return False
    return True


def _steps(component: Any, key: str, field: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a component, those within sequences as well."""
    left, count = [component], 0
    while left:
        step = left.pop()
        if step is None:
            continue
        count += 1
        check(f"{field}: the number of steps", count, PIPELINE_STEPS)
        if step["type"] == "Sequence":
            left += reversed(step[key])
        else:
            yield step


def _check_strings(field: str, step: Mapping[str, Any]) -> None:
    left: list[tuple[str, Any]] = [*step.items()]
    seen = 0
    while left:
        key, value = left.pop()
        seen += 1
        check(f"{field}: the number of its settings", seen, INSERTED_BYTES)
        if isinstance(value, str):
            if (bound := _LARGE.get(key, INSERTED_BYTES)) is not None:
                check(f"{field}: the length of {key}", _size(value), bound)
        elif isinstance(value, dict):
            left += [(key if key in _LARGE else inner, each) for inner, each in value.items()]
        elif isinstance(value, list):
            check(f"{field}: the number of {key}", len(value), AROUND_TEXT)
            left += [(key, each) for each in value]


def _growth(step: Mapping[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            written = _size(step["content"])
            pattern = step["pattern"].get("String")
            # An expression may match a single character, or between two of them.
            return written / _size(pattern) if pattern else 1.0 + written
        case "Prepend":
            return 1.0 + _size(step["prepend"])
        case "Metaspace":
            return 1.0 + _size(step["replacement"])
        case "ByteLevel":
            return 4.0 if step.get("add_prefix_space") else 2.0
        case "Precompiled":
            return check_charsmap(base64.b64decode(step["precompiled_charsmap"]))
        case name:
            return _GROWTH.get(name, 1.0)


def _size(text: str | None) -> int:
    return len((text or "").encode(errors="surrogatepass"))
