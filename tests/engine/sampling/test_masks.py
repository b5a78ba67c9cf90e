from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.engine.sampling.masks import MaskedRow, Masker
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.matcher import Matcher
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.text.chat import Llama2Chat
from llorch_worker.text.decoding_table import DecodingTable, TokenBytes
from llorch_worker.text.tokenizer import Tokenizer

NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module", params=[0, 1, 31, 40])
def vocabulary(loaded: Any, request: pytest.FixtureRequest) -> ConstraintVocabulary:
    """With as many ids of padding."""
    tokenizer = loaded.tokenizer
    size = tokenizer.vocab_size + request.param
    return ConstraintVocabulary(tokenizer, size, tokenizer.eos_token_ids)


@pytest.fixture
def matcher_of(vocabulary: ConstraintVocabulary) -> Callable[[str], Matcher]:
    def make(regex: str) -> Matcher:
        request = GenerationRequest(prompt="a", structured_outputs={"regex": regex})
        matcher = Compiler(vocabulary).compile(request)
        assert matcher is not None
        return matcher

    return make


def allowed(vocabulary: ConstraintVocabulary, row: MaskedRow) -> list[int]:
    """The ids that a row's mask leaves in a batch of three."""
    logits = torch.zeros(3, vocabulary.end_id)
    masks = Masker(vocabulary.end_id, torch.device("cpu")).begin([row]).result()
    masks.apply(logits)
    others = [index for index in range(3) if index != row.row]
    assert torch.equal(logits[others], torch.zeros(2, vocabulary.end_id))
    return torch.isfinite(logits[row.row]).nonzero().flatten().tolist()


def test_a_mask_allows_what_may_follow(
    vocabulary: ConstraintVocabulary, matcher_of: Callable[[str], Matcher]
) -> None:
    digits = [i for i, data in enumerate(vocabulary.tokens) if data and data.isdigit()]
    row = MaskedRow(1, matcher_of("[0-9]{4,}"), NONE, may_stop=True)
    assert allowed(vocabulary, row) == [i for i in digits if vocabulary.tokens[i].isascii()]


def test_a_text_may_end_only_where_the_grammar_and_the_request_let_it(
    vocabulary: ConstraintVocabulary, matcher_of: Callable[[str], Matcher]
) -> None:
    stops = vocabulary.eos_ids
    for text, ids, may_stop in [
        ("", NONE, True),
        ("0", stops, True),
        ("0", NONE, False),
    ]:
        matcher = matcher_of("[0-9]+")
        for token_id in vocabulary(text.encode()):
            matcher.push(token_id)
        left = allowed(vocabulary, MaskedRow(0, matcher, stops, may_stop))
        assert stops & set(left) == ids
        # Without stop tokens the text goes on.
        assert not stops & set(allowed(vocabulary, MaskedRow(2, matcher, NONE, may_stop)))


def test_a_forced_token_is_the_only_one(
    vocabulary: ConstraintVocabulary, matcher_of: Callable[[str], Matcher]
) -> None:
    matcher = matcher_of("Once upon a time")
    row = MaskedRow(2, matcher, vocabulary.eos_ids, may_stop=False)
    assert allowed(vocabulary, row) == matcher.forced[:1]


def test_a_card_computes_the_same_from_the_bits(
    vocabulary: ConstraintVocabulary, matcher_of: Callable[[str], Matcher]
) -> None:
    matchers = [matcher_of(regex) for regex in ("[a-z]+", "a|b", "(.|\n)*x", "[^t]*")]
    rows = [MaskedRow(i, m, vocabulary.eos_ids, may_stop=True) for i, m in enumerate(matchers)]
    here, there = (Masker(vocabulary.end_id, torch.device(d)) for d in ("cpu", "meta"))
    logits = torch.randn(4, vocabulary.end_id)
    again = logits.clone()
    here.begin(rows).result().apply(logits)
    there.begin(rows).result().apply(again)
    assert torch.equal(logits, again)
    assert np.isfinite(logits.numpy()).any(axis=1).all()


class Bare:
    """A codec of a few tokens, among them none for most bytes."""

    special_ids: Mapping[str, int] = {"</s>": 0}
    decoding_table = DecodingTable(
        TokenBytes([b"", b"a", b"b"]), {0: "</s>"}, False, frozenset(), "replace", False
    )

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [" ab".index(letter) for letter in text if letter in "ab"]


def test_a_text_that_cannot_go_on_ends_with_an_error() -> None:
    """And its row is left with tokens, because a row of none would have no probabilities."""
    tokenizer = Tokenizer(
        Bare(),
        prefix_ids=(),
        suffix_ids=(),
        bos_token_id=None,
        eos_token_ids=(0,),
        chat=Llama2Chat(Bare(), None, None),
    )
    vocabulary = ConstraintVocabulary(tokenizer, 3, frozenset([0]))
    request = GenerationRequest(prompt="a", structured_outputs={"regex": "(a|b)(c|d)"})
    matcher = Compiler(vocabulary).compile(request)
    assert matcher is not None
    matcher.push(1)
    row = MaskedRow(0, matcher, vocabulary.eos_ids, may_stop=True)
    assert allowed(vocabulary, row) == [0, 1, 2]
    for last in (lambda: matcher.end(0), lambda: matcher.push(2)):
        with pytest.raises(
            InvalidRequest, match=r"\.regex: must stay within .* no token continues"
        ):
            last()
