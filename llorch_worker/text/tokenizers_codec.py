"""Vocabularies of ``tokenizer.json``, through the `tokenizers` library."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from llorch_worker.contract import InvalidRequest
from llorch_worker.model_files.bounds import AROUND_TEXT, check
from llorch_worker.model_files.side_file import parse_object
from llorch_worker.text import added_tokens
from llorch_worker.text.decoding_table import REPLACE_EACH_BYTE, DecodingTable, TokenBytes
from llorch_worker.text.definition_check import check_definition
from llorch_worker.text.least_tokens import LeastTokens
from llorch_worker.text.sentencepiece_model import SPACE
from llorch_worker.text.spellings import any_of
from llorch_worker.text.stand_ins import NO_STAND_INS, StandIns

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_NO_PART: dict[str, Any] = {"type": "none"}
# Each call encodes one text, for which a pool of threads is no help.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizersCodec:
    """Text to ids and ids to bytes as a ``tokenizer.json`` defines them.

    Raises:
        ValueError: the definition is damaged, or decodes in a way that is not done here.
    """

    transformers_class = "PreTrainedTokenizerFast"

    def __init__(
        self,
        definition: str,
        by_id: Mapping[int, added_tokens.AddedToken] = MappingProxyType({}),
        more: Sequence[added_tokens.AddedToken] = (),
    ) -> None:
        """``definition``: the content of tokenizer.json. ``by_id``: tokens that settings add to it
        or change; ``more``: those that they add behind these, unless they are there."""
        try:
            parts = parse_object(definition)
        except ValueError as error:
            raise ValueError(f"tokenizer.json {error}") from error
        self._own_ids = check_definition(parts)
        self._parsing = _load(definition)
        self._add(by_id, more)
        # Two, because the switch is state of the object and many threads encode.
        self._literal = _beside(self._parsing)
        self._literal.encode_special_tokens = True
        self._is_unigram = isinstance(parts["model"]["vocab"], list)
        splitter = self._parsing.pre_tokenizer
        self._splitters = [] if splitter is None else [splitter]
        self._end_words_in_control()
        self._composes = (
            [part["type"] for part in _parts(parts.get("normalizer"), "normalizers")] == ["NFC"]
        ) and not any(token.normalized for token in self._added.values())
        if self._composes:
            # The library takes as long for it as for the rest; see _composed.
            self._parsing.normalizer = self._literal.normalizer = parts["normalizer"] = None
        self._decoders = _parts(parts.get("decoder"), "decoders")
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in self._decoders)
        # The library then puts a space between any two tokens.
        self._spaces_all = parts.get("decoder") is None
        kept = [] if self._spaces_all else _kept_bytes(parts, self._is_byte_level)
        self._kept_bytes = kept
        known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
        unknown = [part["type"] for part in self._decoders if part["type"] not in known]
        if unknown and not self._spaces_all:
            raise ValueError(f"it decodes with {unknown[0]!r}, which is not done here")
        with _no_panic("\n"):
            self._newline_ids = self._literal.encode("\n", add_special_tokens=False).ids

    def _add(
        self,
        by_id: Mapping[int, added_tokens.AddedToken],
        more: Sequence[added_tokens.AddedToken],
    ) -> None:
        known = {token.content for token in self._added.values()}
        # A token of the model's own is found in a text only once it is added, too.
        fresh = [token for token in more if token.text not in known]
        self.appended = frozenset(
            token.text for token in fresh if self.token_to_id(token.text) is None
        )
        """The spellings of the tokens in ``more`` that the vocabulary lacks."""
        lacking = {token.text for token in by_id.values() if self.token_to_id(token.text) is None}
        tokens = [
            AddedToken(token.text, **{name: getattr(token, name) for name in _FLAGS})
            for token in [*(by_id[token_id] for token_id in sorted(by_id)), *fresh]
        ]
        self._parsing.add_tokens(tokens)
        for token_id, token in by_id.items():
            if token.text in lacking and (got := self.token_to_id(token.text)) != token_id:
                raise ValueError(
                    f"its settings add {token.text[:40]!r} as id {token_id}, but the next of "
                    f"tokenizer.json is {got}"
                )

    @property
    def _added(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self._parsing.get_added_tokens_decoder()
        return added

    @cached_property
    def special_ids(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._added.items() if token.special}

    @property
    def size(self) -> int:
        """The largest id and 1."""
        return max(self._own_ids, *(token_id + 1 for token_id in self._added), 0)

    def token_to_id(self, token: str, /) -> int | None:
        token_id: int | None = self._parsing.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int, /) -> str | None:
        # Settings say -1 for a token that there is not.
        known = 0 <= token_id < 2**32
        token: str | None = self._parsing.id_to_token(token_id) if known else None
        return token

    def with_control(self, spellings: Collection[str]) -> Self:
        """This codec, in which these tokens of the vocabulary are control tokens too."""
        added = {token.content: token for token in self._added.values()}
        tokens = []
        for spelling in spellings:
            token = added.get(spelling) or AddedToken(spelling, normalized=False)
            token.special = True
            tokens.append(token)
        for tokenizer in (self._parsing, self._literal):
            tokenizer.add_special_tokens(tokens)
        self._end_words_in_control()
        return self

    def _end_words_in_control(self) -> None:
        """For a unigram model: splits words behind the first character of a control token's
        spelling. Otherwise the model would find the token in a text like any other piece."""
        spellings = [token.content for token in self._added.values() if token.special]
        heads = [f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in spellings if len(s) > 1]
        if self._is_unigram and heads:
            ends = pre_tokenizers.Split(Regex("|".join(heads)), "merged_with_previous")
            self._literal.pre_tokenizer = pre_tokenizers.Sequence([*self._splitters, ends])

    def encode(
        self, text: str, parse_special: bool = False, stand_ins: StandIns = NO_STAND_INS
    ) -> list[int]:
        """See :class:`Codec`."""
        if not parse_special:
            return self._ids(self._literal, text)
        if not stand_ins.meanings:
            return self._ids(self._parsing, text)
        text = self._composed(self._parsing, text)
        with _no_panic(text):
            # With offsets, which are slower.
            (encoding,) = self._parsing.encode_batch([text], add_special_tokens=False)
        control = set(self.special_ids.values())
        ids: list[int] = []
        begin = 0
        between: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in control:
                ids += self._as_meant(text[begin:start], between, stand_ins)
                ids.append(token_id)
                begin, between = end, []
            else:
                between.append(token_id)
        return ids + self._as_meant(text[begin:], between, stand_ins)

    def _as_meant(self, text: str, ids: list[int], stand_ins: StandIns) -> list[int]:
        """The ids of a text between control tokens, whose ``ids`` with stand-ins are given."""
        meant = stand_ins.meant(text)
        if meant == text:
            return ids
        if self._ids(self._parsing, text) == ids:
            return self._ids(self._literal, meant)
        # The library puts a space before a text, but not in the middle.
        after_newline = self._ids(self._literal, "\n" + meant)
        if after_newline[: len(self._newline_ids)] == self._newline_ids:
            return after_newline[len(self._newline_ids) :]
        return self._ids(self._literal, meant)

    def check_length(self, text: str, at_most: int) -> None:
        """See :class:`Codec`."""
        # Composition may leave fewer bytes.
        if self._least is not None and (
            not self._composes or unicodedata.is_normalized("NFC", text)
        ):
            self._least.check(text if self._is_byte_level else text.replace(SPACE, " "), at_most)

    def template_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the file's post-processor puts before and after a text."""
        with _no_panic("a"):
            with_template: list[int] = self._literal.encode("a", add_special_tokens=True).ids
        bare = self._ids(self._literal, "a")
        self._check_template(with_template)
        for start in range(len(with_template) - len(bare) + 1):
            if with_template[start : start + len(bare)] == bare:
                return with_template[:start], with_template[start + len(bare) :]
        return [], []

    def pair_ids(self) -> list[int]:
        """The ids that it puts between the texts of a pair. Raises as the class does."""
        with _no_panic("a"):
            pair: list[int] = self._literal.encode("a", "a", add_special_tokens=True).ids
        self._check_template(pair)
        count = len(self._ids(self._literal, "a"))
        before, behind = map(len, self.template_ids())
        return pair[before + count : len(pair) - count - behind]

    def _check_template(self, ids: Sequence[int]) -> None:
        check("tokenizer.json: the number of tokens around a text", len(ids), AROUND_TEXT)
        for token_id in ids:
            if self.id_to_token(token_id) is None:
                raise ValueError(
                    f"the post_processor of tokenizer.json writes the id {token_id}, which is no "
                    "token's"
                )

    @cached_property
    def _least(self) -> LeastTokens | None:
        added = self._added.values()
        # Such a token takes any number of spaces.
        if not self._kept_bytes or any(token.lstrip or token.rstrip for token in added):
            return None
        table = self.decoding_table
        return LeastTokens(table.token_bytes, self.special_ids, self._kept_bytes)

    @cached_property
    def decoding_table(self) -> DecodingTable:
        tokens = self._parsing.get_vocab(with_added_tokens=True)
        added = self._added
        types = {part["type"] for part in self._decoders}
        byte_level = self._is_byte_level
        word_piece = "WordPiece" in types
        token_bytes = [b""] * (max(tokens.values(), default=-1) + 1)
        for token, token_id in tokens.items():
            if self._spaces_all:
                control = token_id in added and added[token_id].special
                token_bytes[token_id] = b"" if control else f" {token}".encode()
            elif token_id in added:
                token_bytes[token_id] = b"" if added[token_id].special else token.encode()
            elif byte_level:
                token_bytes[token_id] = _byte_level_bytes(token)
            elif "ByteFallback" in types and _BYTE_PIECE.fullmatch(token):
                token_bytes[token_id] = bytes([int(token[3:5], 16)])
            elif word_piece:
                inside = token.startswith("##")
                token_bytes[token_id] = (token[2:] if inside else f" {token}").encode()
            else:
                token_bytes[token_id] = token.replace(SPACE, " ").encode()
        strips = bool(types & {"none", "Metaspace", "WordPiece"}) or any(
            part["type"] == "Strip" and part["start"] for part in self._decoders
        )
        return DecodingTable(
            TokenBytes(token_bytes),
            {token_id: token.content for token_id, token in added.items() if token.special},
            drops_first_space=strips and not byte_level,
            own_space=frozenset(),
            errors="replace" if byte_level else REPLACE_EACH_BYTE,
            control_ends_character=False,
        )

    def _composed(self, tokenizer: RustTokenizer, text: str) -> str:
        """``text`` in Unicode's form C between the tokens that the library finds first."""
        if not self._composes or unicodedata.is_normalized("NFC", text):
            return text
        spellings = [
            token.content
            for token in self._added.values()
            if tokenizer is self._parsing or not token.special
        ]
        parts = re.split(f"({any_of(spellings)})", text) if spellings else [text]
        return "".join(
            part if index % 2 else unicodedata.normalize("NFC", part)
            for index, part in enumerate(parts)
        )

    def _ids(self, tokenizer: RustTokenizer, text: str) -> list[int]:
        text = self._composed(tokenizer, text)
        # Only the functions for batches release Python's lock.
        with _no_panic(text):
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


@contextmanager
def _no_panic(text: str) -> Iterator[None]:
    """Refuses a text at which the library panics, which would end the thread: that is no Exception.

    It does so when an expression gives up after millions of attempts.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        rule = "the model's tokenizer must be able to read it"
        got = f"{len(text)} characters, at which it fails"
        raise InvalidRequest.from_fault("prompt", rule, got) from None


def _load(definition: str) -> RustTokenizer:
    try:
        tokenizer = RustTokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"its tokenizer definition is damaged ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _beside(other: RustTokenizer) -> RustTokenizer:
    """One of the same definition that shares its model, which takes most of the memory."""
    tokenizer = RustTokenizer(other.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(tokenizer, part, getattr(other, part))
    added = other.get_added_tokens_decoder()
    tokenizer.add_tokens([added[token_id] for token_id in sorted(added)])
    return tokenizer


def _kept_bytes(definition: dict[str, Any], byte_level: bool) -> list[int]:
    """The bytes that are each in exactly one token, whatever the text; none if that is unknown."""
    model = definition["model"]
    marks_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = _parts(definition.get("normalizer"), "normalizers")
    splitters = _parts(definition.get("pre_tokenizer"), "pretokenizers")
    known = {"none", "ByteLevel" if byte_level else "Metaspace", "Digits", "Split"}
    if (
        model.get("type") != "BPE"
        or byte_level != any(part["type"] == "ByteLevel" for part in splitters)
        or any(
            part["type"] not in ("none", "Prepend") and part != marks_spaces for part in normalizers
        )
        or any(part["type"] not in known or part.get("behavior") == "Removed" for part in splitters)
    ):
        return []
    if byte_level:
        # The library leaves others out.
        return [byte for character, byte in _BYTE_ALPHABET.items() if character in model["vocab"]]
    falls_back = model.get("byte_fallback") and all(
        f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)
    )
    return [*range(256)] if falls_back else []


def _parts(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    component = component or _NO_PART
    if component["type"] != "Sequence":
        return [component]
    return [leaf for part in component[name] for leaf in _parts(part, name)]


# GPT-2 spells each byte as a printable character: itself, or one from 0x100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_ALPHABET = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_ALPHABET |= {chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)}


_BYTE_SPELLINGS = {byte: character for character, byte in _BYTE_ALPHABET.items()}
_STAND_IN = "\ufdd1"
"""A Unicode noncharacter, in front of what stands for a token that the library does not take."""


def as_byte_level(token: str, taken: Container[str]) -> str:
    """``token``, or what stands for it if it is no UTF-8 or its spelling is ``taken``.

    No text is encoded as a stand-in, and it decodes to the token's bytes.
    """
    data = token.encode(errors="surrogateescape")
    if token != data.decode(errors="replace"):
        token = _STAND_IN + "".join(_BYTE_SPELLINGS[byte] for byte in data)
    while token in taken:
        token = _STAND_IN + token
    return token


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_ALPHABET[character] for character in token.lstrip(_STAND_IN))
    except KeyError:
        return token.encode()
