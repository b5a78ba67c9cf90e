from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.text import IncrementalDetokenizer, Tokenizer


def _pieces(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_decoded_whole(
    any_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(
        st.lists(
            st.one_of(
                st.integers(0, any_tokenizer.vocab_size - 1),
                # Bytes and control tokens lie at the front, or at the end, of every vocabulary.
                st.integers(0, min(260, any_tokenizer.vocab_size - 1)),
                st.integers(any_tokenizer.vocab_size - 8, any_tokenizer.vocab_size - 1),
            ),
            max_size=30,
        )
    )
    whole = any_tokenizer.decode(ids)
    assert "".join(_pieces(IncrementalDetokenizer(any_tokenizer, False), ids)) == whole
    continuing = "".join(_pieces(IncrementalDetokenizer(any_tokenizer), ids))
    assert continuing in (whole, f" {whole}")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_valid_text_never_shows_a_broken_character(any_tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    ids = any_tokenizer.encode(text)
    pieces = _pieces(IncrementalDetokenizer(any_tokenizer), ids)
    assert not any("\ufffd" in piece for piece in pieces)
    shown = "".join(pieces).removeprefix(" ")
    assert shown == text.replace("▁", " ").removeprefix(" ") or any_tokenizer.decode(ids) == text


def test_a_character_of_many_tokens_comes_out_whole_at_its_last(llama2: Tokenizer) -> None:
    ids = llama2.encode("🖂", add_special_tokens=False)[1:]
    assert len(ids) == 4
    assert _pieces(IncrementalDetokenizer(llama2), ids) == ["", "", "", "🖂", ""]


def test_an_unfinished_character_is_one_mark_for_each_byte(llama2: Tokenizer) -> None:
    ids = llama2.encode("🖂", add_special_tokens=False)[1:4]
    assert _pieces(IncrementalDetokenizer(llama2), ids) == ["", "", "", "\ufffd" * 3]


def test_prompt_and_completion_read_right_together(llama2: Tokenizer) -> None:
    ids = llama2.encode("Once upon a time", add_special_tokens=False)
    prompt, completion = ids[:2], ids[2:]
    assert llama2.decode(prompt) == "Once upon"
    assert IncrementalDetokenizer(llama2).push(completion) == " a time"
    assert llama2.decode(completion) == "a time"


def test_control_tokens_have_no_text(llama2: Tokenizer) -> None:
    assert llama2.decode([1, *llama2.encode("Hi", add_special_tokens=False), 2]) == "Hi"


@pytest.mark.parametrize("token_id", [-1, 32_000, 10**12])
def test_an_id_outside_the_vocabulary_is_named(llama2: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary of 32000"):
        IncrementalDetokenizer(llama2).push([token_id])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llama2.decode([token_id])
