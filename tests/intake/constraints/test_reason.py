"""Why a grammar is refused, without the user's text and without llguidance's jargon."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.reason import reason
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary


@pytest.fixture(scope="module")
def compiler(loaded: Any) -> Compiler:
    tokenizer = loaded.tokenizer
    return Compiler(ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))


def refused(compiler: Compiler, **outputs: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(GenerationRequest(prompt="a", structured_outputs=outputs))
    (fault,) = caught.value.faults
    return fault.rule


@pytest.mark.parametrize(
    "secret", ["/////", "→", "🙂🙂", "!?", "-", "&", "::::", "''''", "zsecretz", "a!b"]
)
@pytest.mark.parametrize("keyword", ["maximum", "type", "multipleOf", "minItems", "required"])
def test_a_refusal_of_a_schema_quotes_none_of_its_signs_and_words(
    compiler: Compiler, keyword: str, secret: str
) -> None:
    assert secret not in refused(compiler, json={keyword: secret})


@pytest.mark.parametrize("name", ["///", "→", "zsecretz", "a/b"])
def test_a_refusal_quotes_no_name(compiler: Compiler, name: str) -> None:
    assert name not in refused(compiler, json={"$ref": f"#/{name}"})
    assert name not in refused(compiler, grammar=f"start: %regex {{{name!r}: 1}}".replace("'", '"'))


def test_what_is_wrong_stays_readable(compiler: Compiler) -> None:
    rule = refused(compiler, json={"type": "number", "minimum": 0.5, "maximum": 0.25})
    assert "minimum (...) is greater than maximum (...)" in rule
    assert refused(compiler, json={"maximum": "/"}) == (
        "must compile: Expected f64 for 'maximum', got ..."
    )
    found = "found '+' or '*' or '?'"
    assert found in refused(compiler, grammar='start[+]: "a"')


TOO_COMPLEX = "it has more rules, states or ways to read a text than the parser follows"


def test_a_grammar_beyond_the_parsers_limits_is_refused_in_plain_words(compiler: Compiler) -> None:
    grammar = f"start: /{'(a|b|c)?' * 3000}/"
    assert refused(compiler, grammar=grammar) == f"must compile: {TOO_COMPLEX}"


@pytest.mark.parametrize(
    "message",
    [
        "Too many items (limit 200000; ff_tokens)",
        "grammar size (number of symbols) too big (limit for this grammar: 200000)",
        "initial lexer configuration (grammar) too big (limit for this grammar: 100)",
        "fuel exhausted when checking relevance of lexemes (100)",
        "too many states: 20001",
    ],
)
def test_no_limit_of_the_parser_is_told_in_its_own_words(message: str) -> None:
    assert reason(message, "start: /a/") == TOO_COMPLEX


def test_a_name_like_a_limit_is_a_name(compiler: Compiler) -> None:
    assert "unknown name" in refused(compiler, grammar="start: limit")
