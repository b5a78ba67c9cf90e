"""Ids and text must be those of the sentencepiece library, in Llama-2's vocabulary and others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llorch_worker.text import Tokenizer, load_tokenizer

REFERENCE = sentencepiece.SentencePieceProcessor
# Dense in what the vocabulary treats specially, beside all of Unicode.
HARD_TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                "a",
                "b",
                " ",
                "  ",
                "\n",
                "=",
                "the",
                " the",
                "日",
                "😀",
                "\u0301",
                "▁",
                "<s>",
                "<0x0A>",
            ]
        ),
    ),
    max_size=30,
).map("".join)


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


@pytest.mark.parametrize("unit", ["a", " ", "=", "ab", "日本", "x1", "a ", "\n"])
def test_long_runs_get_sentencepieces_ids(
    llama2: Tokenizer, reference: REFERENCE, unit: str
) -> None:
    for length in (1, 2, 3, 5, 7, 15, 16, 17, 31, 1_000, 100_003):
        text = (unit * length)[:length]
        assert llama2.encode(text, add_special_tokens=False) == reference.encode(text)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, 31_999),
            st.integers(3, 258),  # bytes
            st.sampled_from([0, 1, 2, 259, 29_871, 29_871, 243, 162, 155, 132]),
        ),
        max_size=20,
    )
)
@example(ids=[243, 1, 162])  # a control token inside a character
@example(ids=[1, 29_871, 29_871, 15_043])
@example(ids=[243, 162, 15_043])
def test_text_equals_sentencepieces_for_any_ids(
    llama2: Tokenizer, reference: REFERENCE, ids: list[int]
) -> None:
    assert llama2.decode(ids) == reference.decode(ids)


PIECES = st.dictionaries(
    st.text("ab▁", min_size=1, max_size=4),
    # Few scores, so that many are equal; normal, user-defined and unused pieces.
    st.tuples(st.sampled_from([0.0, -1.0, -2.0]), st.sampled_from([1, 1, 1, 1, 4, 5])),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(
    pieces=PIECES,
    texts=st.lists(st.text("ab c▁", max_size=20), min_size=1, max_size=8),
    space_prefix=st.booleans(),
    remove_extra_spaces=st.booleans(),
    byte_fallback=st.booleans(),
)
def test_ids_equal_sentencepieces_in_any_vocabulary(
    write_sentencepiece: Callable[..., bytes],
    tmp_path_factory: pytest.TempPathFactory,
    source: Callable[[Path], object],
    pieces: dict[str, tuple[float, int]],
    texts: list[str],
    space_prefix: bool,
    remove_extra_spaces: bool,
    byte_fallback: bool,
) -> None:
    """Equal scores, unused and user-defined pieces, unknown characters, spaces inside pieces."""
    head = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    if byte_fallback:
        head += [(f"<0x{value:02X}>", 0.0, 6) for value in range(256)]
    model = write_sentencepiece(
        [*head, *[(text, score, kind) for text, (score, kind) in pieces.items()]],
        trainer={35: int(byte_fallback)},
        normalizer={3: int(space_prefix), 4: int(remove_extra_spaces)},
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    folder = tmp_path_factory.mktemp("vocabulary", numbered=True)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = load_tokenizer(source(folder))  # type: ignore[arg-type]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        if not remove_extra_spaces:
            assert tokenizer.decode(ids) == reference.decode(ids), text


def test_control_tokens_spelt_out_by_a_user_stay_text(llama2: Tokenizer) -> None:
    ids = llama2.encode("a <s> b </s> <unk>")
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    assert llama2.decode(ids) == "a <s> b </s> <unk>"


def test_each_stretch_between_parsed_control_tokens_is_a_text_of_its_own(
    llama2: Tokenizer, reference: REFERENCE
) -> None:
    ids = llama2.encode("<s>Hi there</s><s> x", add_special_tokens=False, parse_special=True)
    assert ids == [1, *reference.encode("Hi there"), 2, 1, *reference.encode(" x")]
