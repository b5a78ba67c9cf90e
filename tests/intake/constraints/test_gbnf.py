"""GBNF by character: the texts that a grammar describes, and no others, in any tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.gbnf import as_lark
from llorch_worker.intake.constraints.matcher import Matcher
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.intake.constraints.gbnf_grammars import CASES, ENDLESS, PROGRAM
from tests.intake.constraints.plain_gbnf import PlainGbnf


@pytest.fixture(scope="module")
def demo(loaded: Any) -> ConstraintVocabulary:
    tokenizer = loaded.tokenizer
    return ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def large(smollm2: Path) -> ConstraintVocabulary:
    """Of 49,152 tokens, of a real model."""
    tokenizer = load_tokenizer(open_vocabulary(smollm2))
    return ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def compiled(vocabulary: ConstraintVocabulary, grammar: str) -> Matcher:
    request = GenerationRequest(prompt="a", structured_outputs={"grammar": grammar})
    matcher = Compiler(vocabulary).compile(request)
    assert matcher is not None
    return matcher


def fits(matcher: Matcher, ids: list[int]) -> bool:
    """Whether each of ``ids`` may come where it does, and the text may end after the last.

    Where the grammar leaves no choice of the text, the mask has one spelling of it only.
    """
    matcher = matcher.copy()
    for token_id in ids:
        forced = bool(matcher.forced)
        bits = np.frombuffer(matcher.ll_matcher.compute_bitmask(), np.int32)
        allowed = forced or bool(bits[token_id >> 5] >> (token_id & 31) & 1)
        try:
            matcher.push(token_id)
        except InvalidRequest:
            assert forced or not allowed
            return False
        assert allowed
    return matcher.ll_matcher.is_accepting()


def tokenisations(vocabulary: ConstraintVocabulary, text: str) -> Iterator[list[int]]:
    """``text`` byte by byte, as the vocabulary spells it, and cut anywhere before that."""
    data = text.encode()
    ids = {data: token_id for token_id, data in enumerate(vocabulary.tokens)}
    yield [ids[bytes([byte])] for byte in data]
    yield vocabulary(data)
    chance = random.Random(text)
    cuts = sorted(chance.sample(range(len(data) + 1), min(len(data), 8)))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    yield [token_id for piece in pieces for token_id in longest_first(ids, piece)]


def longest_first(ids: dict[bytes, int], data: bytes) -> Iterator[int]:
    while data:
        length = next(n for n in range(len(data), 0, -1) if data[:n] in ids)
        yield ids[data[:length]]
        data = data[length:]


def test_the_texts_are_those_that_a_plain_recogniser_finds_in_the_grammars() -> None:
    for grammar, texts, others in CASES.values():
        plain = PlainGbnf(grammar)
        assert [text for text in [*texts, *others] if plain.describes(text)] == texts


@pytest.mark.parametrize("vocabulary", ["demo", "large"])
@pytest.mark.parametrize(("grammar", "texts", "others"), CASES.values(), ids=CASES)
def test_a_grammar_lets_through_its_texts_and_no_others(
    request: pytest.FixtureRequest,
    vocabulary: str,
    grammar: str,
    texts: list[str],
    others: list[str],
) -> None:
    tokens: ConstraintVocabulary = request.getfixturevalue(vocabulary)
    matcher = compiled(tokens, grammar)
    for text in [*texts, *others]:
        for ids in tokenisations(tokens, text):
            assert fits(matcher, ids) is (text in texts), (text, ids)


TERMINALS = st.sampled_from(['"a"', '"b"', '"ab"', '""', "[ab]", "[^a]", ".", "x", "y", "root"])
PARTS = st.recursive(
    TERMINALS,
    lambda part: st.one_of(
        st.lists(part, max_size=3).map(lambda parts: f"({' '.join(parts)})"),
        st.lists(part, min_size=2, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
        st.tuples(part, st.sampled_from("*+?")).map("".join),
        st.tuples(part, st.sampled_from(["{2}", "{1,}", "{0,2}", "{2,3}", "{0}"])).map("".join),
    ),
    max_leaves=6,
)
GRAMMARS = st.tuples(PARTS, PARTS, PARTS).map("root ::= {0[0]}\nx ::= {0[1]}\ny ::= {0[2]}".format)
SHORT_TEXTS = [
    f"{number:b}"[1:].replace("0", "a").replace("1", "b") for number in range(2, 2**5)
]  # "a", "b", "aa", ... of up to four letters


@settings(max_examples=60, deadline=None, derandomize=True)
@given(GRAMMARS)
def test_random_grammars_let_through_what_they_describe(
    demo: ConstraintVocabulary, grammar: str
) -> None:
    plain = PlainGbnf(grammar)
    described = [text for text in SHORT_TEXTS if plain.describes(text)]
    try:
        matcher = compiled(demo, grammar)
    except InvalidRequest:
        # No text, or the empty one only.
        assert not described
        return
    letters = {letter: demo.tokens.index(letter.encode()) for letter in "ab"}
    for text in SHORT_TEXTS:
        assert fits(matcher, [letters[letter] for letter in text]) is (text in described), text


def first_bytes(vocabulary: ConstraintVocabulary, grammar: str) -> set[bytes]:
    """The single bytes with which a text may begin."""
    bits = np.frombuffer(compiled(vocabulary, grammar).ll_matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    return {vocabulary.tokens[i] for i in allowed if len(vocabulary.tokens[i]) == 1}


def test_no_text_begins_that_could_never_end(demo: ConstraintVocabulary) -> None:
    grammar = 'root ::= "a" x | "b" x* | "c"\nx ::= "x" x | y\ny ::= "y" (x | y)'
    assert first_bytes(demo, grammar) == {b"b", b"c"}
    with pytest.raises(InvalidRequest, match="root describes only texts that never end"):
        compiled(demo, 'root ::= "a" root')


@pytest.mark.parametrize(
    ("escape", "character"),
    [(r"\u00e9", "é"), (r"\U0001F600", "😀"), (r"\x7e", "~"), (r"\\", "\\"), ("\n", "\n")],
)
def test_an_escape_is_its_character_in_a_text_and_in_a_class(
    large: ConstraintVocabulary, escape: str, character: str
) -> None:
    matcher = compiled(large, f'start ::= [{escape}]\nroot ::= "{escape}" start')
    assert fits(matcher, large(character * 2))
    assert not fits(matcher, large(character + "e"))


def test_a_grammar_may_come_from_another_editor(demo: ConstraintVocabulary) -> None:
    matcher = compiled(demo, '\ufeff# one\r\nroot ::=\r\n\tx\r\n  | "b" # two\r\n\r\nx ::= "a"\r\n')
    assert fits(matcher, demo("a"))
    assert fits(matcher, demo("b"))
    assert not fits(matcher, demo("ab"))


def test_a_grammar_in_lark_may_have_a_text_of_gbnf(demo: ConstraintVocabulary) -> None:
    matcher = compiled(demo, 'start: "a ::= " /[a-z]+/ // b ::= c')
    assert fits(matcher, demo("a ::= b"))


WRONG = [
    ('root ::= "a" zsecretz', "line 1: no line defines the rule that is used here"),
    ('x ::= "a"', "no line defines the rule root"),
    ('root ::= "a"\n\nx ::= ("b"\ny ::= "c"', "line 3: a ( without its )"),
    ('root ::= "a")', "line 1: a ) without its ("),
    ('# one\nroot ::= "zsecretz', 'line 2: a text has no closing "'),
    ("root ::= [a-z", "line 1: a class of characters has no closing ]"),
    ("root ::= []", "line 1: a class without characters"),
    ("root ::= [z-a]", "line 1: a range of characters must begin with the lower one"),
    (r"root ::= [\uD800]", "line 1: no character of Unicode is meant here"),
    (r'root ::= "\UFFFFFFFF"', "line 1: no character of Unicode is meant here"),
    (r'root ::= "\d"', "line 1: an escape must be one of"),
    (r'root ::= "\u12"', "line 1: an escape must be one of"),
    ("root ::= *", "line 1: nothing stands before the repetition"),
    ('root ::= "a" | + "b"', "line 1: nothing stands before the repetition"),
    ('root ::= "a"{,3}', "line 1: a repetition must be {m}, {m,} or {m,n}"),
    ('root ::= "a"{3,2}', "line 1: a repetition {m,n} must have m <= n"),
    ('root ::= "a"{1000000}', "line 1: a repetition must be of at most 100000"),
    ("root ::= 'a'", "line 1: a character that has no meaning"),
    ('"a"\nroot ::= "b"', "line 1: a rule must begin as name ::="),
    ('root ::= "a"\nx : "b"', "line 2: ::= must follow the name of a rule"),
    ("root ::= " + "(" * 999 + '"a"' + ")" * 999, "groups must not be nested deeper than 200"),
    ("root ::= <|zsecretz|>", "line 1: a token must be a control token of the model"),
    ("root ::= <[300]>", "line 1: a token must be a control token of the model"),
    ("root ::= <zsecretz", "line 1: a token must be <[id]> or <name>"),
    ("root ::= <|im_end|>", "line 1: a token must not be one that ends the text"),
    ("root ::= !<|im_start|>", "line 1: * or + must follow !<...>"),
    ('root ::= !"a"', "line 1: ! must stand before a token"),
]


@pytest.mark.parametrize(("grammar", "rule"), WRONG, ids=[rule for _, rule in WRONG])
def test_an_error_says_what_is_wrong_and_in_which_line(
    large: ConstraintVocabulary, grammar: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(large, grammar)
    (fault,) = caught.value.faults
    assert fault.field == "structured_outputs.grammar"
    assert fault.rule.startswith("must be GBNF: ")
    assert rule in fault.rule
    assert "zsecretz" not in str(caught.value)


def test_a_grammar_names_control_tokens(large: ConstraintVocabulary) -> None:
    start = next(i for i in large.control if large.control[i] == "<|im_start|>")
    other = next(i for i in large.control if i != start and i not in large.eos_ids)
    a, end = large.tokens.index(b"a"), next(iter(large.eos_ids))
    for spelling in ("<|im_start|>", f"<[{start}]>"):
        matcher = compiled(large, f'root ::= "a" {spelling} "a" !{spelling}* {spelling} .*')
        assert fits(matcher, [a, start, a, start])
        assert fits(matcher, [a, start, a, *large("日本a \n"), other, start, a])
        assert not fits(matcher, [a, *large("<|im_start|>"), a, start])
        assert not fits(matcher, [a, start, a, start, start])
        assert not fits(matcher, [a, start, a, a])
        assert not fits(matcher, [a, start, a, end, start])


def test_each_control_token_but_one_is_let_through_wherever_a_grammar_says_so(
    large: ConstraintVocabulary,
) -> None:
    first, second, *_, last = sorted(large.control.keys() - large.eos_ids)
    grammar = f'root ::= !<[{first}]>* "." (!<[{second}]>+ ".")* !<[{first}]>* "!" !<[{last}]>*'
    matcher = compiled(large, grammar)
    dot, end = large("."), large("!")
    assert fits(matcher, [second, last, *dot, first, last, *dot, second, *end, first, second])
    for ids in (
        [first, *dot, *end],
        [*dot, second, *dot, first, *end],
        [*dot, *end, last],
    ):
        assert not fits(matcher, ids), ids


class ManyControlTokens:
    control: Mapping[int, str] = {i: f"<{i}>" for i in range(1, 1000)}
    eos_ids = frozenset({3})


@pytest.mark.parametrize("ids", [[5] * 900, range(4, 900)], ids=["one", "all"])
def test_a_grammar_grows_little_by_the_control_tokens_that_it_leaves_out(
    ids: Iterable[int],
) -> None:
    grammar = "root ::= " + " ".join(f"!<[{token_id}]>*" for token_id in ids)
    assert len(as_lark("grammar", grammar, ManyControlTokens())) < 10 * len(grammar)


LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [a + b + c for a in LETTERS[:14] for b in LETTERS[:14] for c in LETTERS[:10]]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= word "."\nword ::= [a-z ] word | ""', "and so on " * 60 + "."),
        ('root ::= item\nitem ::= [a-z]+ (" " (item | ".") | "!")', "and so on " * 60 + "."),
        ('root ::= word "."\nword ::= word [a-z ] | ""', "and so on " * 60 + "."),
        ("root ::= (" + " | ".join(f'"{word}"' for word in WORDS) + ")+", "abcbcahaa" * 30),
        (
            "root ::= (" + " | ".join(f'"{chr(0x4E00 + i)}"' for i in range(3000)) + ")+",
            "一丁七" * 99,
        ),
        ("root ::= (((a?)*)+ b{0,9})*\na ::= [a-m]\nb ::= [n-z ]", "and so on " * 9),
        (PROGRAM, "int f() {" + "x = (1 + g(y, z)) * 2; // so\n" * 10 + "}"),
    ],
    ids=["to the right", "within a group", "to the left", "words", "signs", "nullable", "program"],
)
def test_a_long_text_stays_within_the_parsers_limits(
    large: ConstraintVocabulary, grammar: str, text: str
) -> None:
    matcher = compiled(large, grammar)
    assert fits(matcher, large(text))


def test_a_text_may_end_after_the_first_line_feed_of_many(large: ConstraintVocabulary) -> None:
    matcher = compiled(large, ENDLESS)
    for token_id in large("1\n"):
        matcher.push(token_id)
    assert not matcher.complete
    assert matcher.ll_matcher.is_accepting()
