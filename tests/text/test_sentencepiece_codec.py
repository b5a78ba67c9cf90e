"""Ids and text must be those of the sentencepiece library, whichever file holds the vocabulary."""

from __future__ import annotations

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llorch_worker.text import Tokenizer
from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.sentencepiece_codec import SentencePieceCodec
from llorch_worker.text.sentencepiece_file import SentencePieceFile
from llorch_worker.text.sentencepiece_model import Piece, PieceKind, write_model

REFERENCE = sentencepiece.SentencePieceProcessor
# Dense in what the vocabulary treats specially, beside all of Unicode.
HARD_TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["a", "b", " ", "  ", "\n", "=", "the", " the", "日", "😀", "́", "▁", "<s>", "<0x0A>"],
        ),
    ),
    max_size=30,
).map("".join)

HEAD = [
    Piece("<unk>", 0.0, PieceKind.UNKNOWN),
    Piece("<s>", 0.0, PieceKind.CONTROL),
    Piece("</s>", 0.0, PieceKind.CONTROL),
]
BYTES = [Piece(f"<0x{value:02X}>", 0.0, PieceKind.BYTE) for value in range(256)]
NO_UTF8 = Piece(b"\xff\xe6".decode(errors="surrogateescape"), -1.0, PieceKind.NORMAL)
LETTERS = [Piece("▁a", -1.5, PieceKind.NORMAL), Piece("a", -2.0, PieceKind.NORMAL)]

# Appended to a model, these override one field of it.
UNIGRAM = b"\x12\x02\x18\x01"
SPACE_AS_SUFFIX = b"\x12\x03\xc0\x01\x01"
PLAIN_SPACES = b"\x1a\x02\x28\x00"


def tokenizer_of(codec: SentencePieceCodec) -> Tokenizer:
    return Tokenizer(
        codec,
        prefix_ids=[],
        suffix_ids=[],
        bos_token_id=None,
        eos_token_ids=[],
        chat=Llama2Chat(codec, None, None),
    )


def test_ids_equal_sentencepieces_on_texts_that_tokenizers_get_wrong(
    llama2: Tokenizer, llama2_file: Tokenizer, reference: REFERENCE, corpus: list[str]
) -> None:
    for text in [*corpus, "".join(corpus), "\n".join(corpus * 20)]:
        expected = reference.encode(text)
        assert llama2.encode(text, add_special_tokens=False) == expected, text[:80]
        assert llama2_file.encode(text, add_special_tokens=False) == expected, text[:80]


@settings(max_examples=400, deadline=None)
@given(text=HARD_TEXT)
def test_ids_equal_sentencepieces_on_any_text(
    llama2: Tokenizer, llama2_file: Tokenizer, reference: REFERENCE, text: str
) -> None:
    ids = llama2.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert llama2_file.encode(text, add_special_tokens=False) == ids
    assert llama2.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("unit", ["a", " ", "=", "日本", "x1", "a ", "\n"])
def test_long_runs_get_sentencepieces_ids(
    llama2: Tokenizer, reference: REFERENCE, unit: str
) -> None:
    for length in (1, 2, 3, 15, 16, 17, 1_000, 100_003):
        text = (unit * length)[:length]
        assert llama2.encode(text, add_special_tokens=False) == reference.encode(text)


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(
        st.one_of(
            st.integers(0, 31_999),
            st.integers(3, 258),  # bytes
            st.sampled_from([0, 1, 2, 259, "▁", "▁", 243, 162, 155, 132]),
        ),
        max_size=20,
    )
)
@example(tokens=[243, 1, 162])  # a control token inside a character
@example(tokens=[1, "▁", "▁", "▁Hello"])
@example(tokens=[243, 162, "▁Hello"])
def test_text_equals_sentencepieces_for_any_ids(
    llama2: Tokenizer, llama2_file: Tokenizer, reference: REFERENCE, tokens: list[int | str]
) -> None:
    ids = [reference.piece_to_id(each) if isinstance(each, str) else each for each in tokens]
    assert 0 not in [token for each, token in zip(tokens, ids, strict=True) if each != 0]
    assert llama2.decode(ids) == llama2_file.decode(ids) == reference.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.dictionaries(
        st.text("ab▁", min_size=1, max_size=4),
        st.sampled_from([PieceKind.NORMAL, PieceKind.USER_DEFINED, PieceKind.UNUSED]),
        max_size=25,
    ),
    text=st.text("ab c▁", max_size=20),
    space_prefix=st.booleans(),
    byte_fallback=st.booleans(),
)
def test_text_equals_sentencepieces_in_any_vocabulary(
    pieces: dict[str, PieceKind], text: str, space_prefix: bool, byte_fallback: bool
) -> None:
    """Unused and user-defined pieces, unknown characters, spaces inside pieces."""
    vocabulary = [*HEAD, *(BYTES if byte_fallback else [])]
    vocabulary += [Piece(piece, 0.0, kind) for piece, kind in pieces.items()]
    model = write_model(vocabulary, add_space_prefix=space_prefix)
    reference = REFERENCE(model_proto=model)
    ids = reference.encode(text)
    for codec in (
        SentencePieceCodec(model, vocabulary),
        SentencePieceFile(model, {}).with_control(()),
    ):
        assert codec.encode(text) == ids
        assert tokenizer_of(codec).decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    "pieces",
    [
        [*HEAD[1:], *BYTES, *LETTERS],
        [*HEAD, *LETTERS, LETTERS[0], Piece("", 0.0, PieceKind.NORMAL)],
        [*HEAD, *LETTERS, *BYTES[:3]],
        [*HEAD, *LETTERS, Piece("<what>", 0.0, PieceKind.UNKNOWN)],
        [*HEAD, *LETTERS, NO_UTF8, NO_UTF8._replace(kind=PieceKind.CONTROL)],
        [*HEAD, *BYTES, BYTES[0], *LETTERS],
    ],
    ids=["no unknown", "repeated and empty", "few bytes", "two unknown", "no UTF-8", "257 bytes"],
)
def test_a_vocabulary_that_the_library_refuses_keeps_its_ids(pieces: list[Piece]) -> None:
    codec = SentencePieceCodec(write_model(pieces), pieces)
    assert codec.encode("a a") == [pieces.index(LETTERS[0])] * 2
    if set(BYTES) <= set(pieces):
        assert codec.encode("\N{LLAMA}")[-1] == pieces.index(BYTES["\N{LLAMA}".encode()[-1]])
    table = codec.decoding_table
    assert len(table.token_bytes) == len(pieces)
    if NO_UTF8 in pieces:
        assert table.token_bytes[pieces.index(NO_UTF8)] == b"\xff\xe6"
        assert table.control[len(pieces) - 1].isprintable()
    assert [table.token_bytes[i] for i, piece in enumerate(pieces) if piece in LETTERS] == [
        piece.text.replace("▁", " ").encode() for piece in pieces if piece in LETTERS
    ]


def test_extra_spaces_are_removed_where_the_model_says_so() -> None:
    codec = SentencePieceCodec(write_model([*HEAD, *LETTERS], remove_extra_spaces=True), [])
    assert codec.encode("  a   a  ") == [3, 3]


@pytest.mark.parametrize(
    ("override", "reason"),
    [(UNIGRAM, "not of the BPE kind"), (SPACE_AS_SUFFIX, "spaces"), (PLAIN_SPACES, "spaces")],
)
def test_kinds_that_llama_does_not_use_are_refused(override: bytes, reason: str) -> None:
    model = write_model([*HEAD, *LETTERS])
    with pytest.raises(ValueError, match=reason):
        SentencePieceFile(model + override, {}).with_control(())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"IQ== 0\nIg== 1\n",  # a list of base64 tokens, which Llama 3 calls tokenizer.model too
        b"\xff" * 40,
        b"\x0a\x7f",
        b"\x0a\x02\x18\x63",
        b"\x80",
    ],
)
def test_a_file_of_another_format_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="damaged, or not a sentencepiece model"):
        SentencePieceFile(content, {})


def test_a_truncated_file_is_refused() -> None:
    whole = write_model([*HEAD, *LETTERS])
    # The normalizer's settings stand last and are optional: without them the file is whole.
    normalizer = whole.index(b"\x1a\x04")
    for size in set(range(len(whole))) - {normalizer}:
        with pytest.raises(ValueError, match=r"damaged|BPE"):
            SentencePieceFile(whole[:size], {}).with_control(())


def test_each_stretch_between_parsed_control_tokens_is_a_text_of_its_own(
    llama2: Tokenizer, reference: REFERENCE
) -> None:
    ids = llama2.encode("<s>Hi there</s><s> x", add_special_tokens=False, parse_special=True)
    assert ids == [1, *reference.encode("Hi there"), 2, 1, *reference.encode(" x")]
