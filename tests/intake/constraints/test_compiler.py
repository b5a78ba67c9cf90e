from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from llorch_worker.contract import GenerationRequest, InvalidRequest, OutOfMemory
from llorch_worker.intake.constraints.compiler import MOST_COMPILING, Compiler
from llorch_worker.intake.constraints.vocabulary import MOST_FORCED_BYTES, ConstraintVocabulary
from tests.forks import printed_by
from tests.text.made_up import made_up_tokenizer

CHAIN = "\n".join(f"r{i}: (r{i + 1})" for i in range(3500))
REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {}}
# Hundreds of milliseconds of work.
LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}


def asking(**outputs: Any) -> GenerationRequest:
    return GenerationRequest(prompt="a", structured_outputs=outputs)


@pytest.fixture(scope="module")
def words() -> ConstraintVocabulary:
    """A vocabulary of " w1" to " w63" and no single bytes."""
    return ConstraintVocabulary(made_up_tokenizer(64), 64, frozenset())


@pytest.fixture(scope="module")
def bytes_too(loaded: Any) -> ConstraintVocabulary:
    tokenizer = loaded.tokenizer
    return ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


SERVE = """
import sys
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine

def answer(**fields):
    request = GenerationRequest(prompt="a", max_tokens=2, **fields)
    engine.submit(request).result(60)
    print("llguidance" in sys.modules)

with Engine.load(sys.argv[1], device="cpu", max_context=64) as engine:
    engine.warm_up()
    answer()
    answer(response_format={"type": "text"})
    answer(structured_outputs={"regex": "a+"})
"""


REFUSED = """
import os, sys
from pathlib import Path
from llorch_worker.allocator import use_one_arena
from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.intake.constraints.compiler import Compiler
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from llorch_worker.text import load_tokenizer
from llorch_worker.text.vocabulary_file import open_vocabulary

def held_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

use_one_arena()
tokenizer = load_tokenizer(open_vocabulary(Path(sys.argv[1])))
compiler = Compiler(ConstraintVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))
wide = {"properties": {f"p{i}": {"type": "string"} for i in range(20)}}
several = {"anyOf": [{**wide, "required": [f"p{i % 20}"]} for i in range(300)]}
before_mib = 0
for schema in ({"const": 1}, several):
    request = GenerationRequest(prompt="a", structured_outputs={"json": schema})
    before_mib = held_mib()
    try:
        compiler.compile(request)
    except InvalidRequest as error:
        print(error.faults[0].rule)
print(held_mib() - before_mib)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_refused_grammar_gives_its_memory_back(loaded: Any) -> None:
    """Measured: 1 MiB, of the 45 that it takes."""
    rule, held_mib = printed_by(REFUSED, loaded.path).splitlines()
    assert rule.startswith("must compile")
    assert float(held_mib) < 15


def test_llguidance_is_imported_for_the_first_grammar(loaded: Any) -> None:
    # Not a fork, which has the library from the process that it is of.
    served = subprocess.run(
        [sys.executable, "-c", SERVE, loaded.path], capture_output=True, text=True, check=True
    )
    assert served.stdout.split() == ["False", "False", "True"]


def test_a_request_without_a_grammar_needs_no_vocabulary(words: ConstraintVocabulary) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}):
        assert Compiler(words).compile(GenerationRequest(prompt="a", **fields)) is None
    assert "ll_tokenizer" not in vars(words)


@pytest.mark.parametrize(
    "outputs",
    [
        {"choice": [" w1", "Bern"]},
        {"choice": [" w1 "]},
        {"regex": "Bern"},
        {"json": {"type": "object"}},
    ],
    ids=lambda outputs: next(iter(outputs)),
)
def test_what_the_vocabulary_cannot_spell_is_refused(
    words: ConstraintVocabulary, outputs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary can"):
        Compiler(words).compile(asking(**outputs))


def test_what_the_vocabulary_can_spell_compiles(words: ConstraintVocabulary) -> None:
    matcher = Compiler(words).compile(asking(choice=[" w1 w12"]))
    assert matcher is not None
    spelt = [words.tokens.index(word) for word in (b" w1", b" w12")]
    for token_id in spelt:
        assert not matcher.complete
        matcher.push(token_id)
    assert matcher.complete


def test_a_grammar_that_takes_too_long_is_refused(bytes_too: ConstraintVocabulary) -> None:
    impatient = Compiler(bytes_too, patience_s=0)
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: must compile within 0 s"):
        impatient.compile(asking(json=LARGE))
    # But not in the engine, which may be busy, where it has compiled before.
    compiled = Compiler(bytes_too, patience_s=None).compile(asking(json={"type": "integer"}))
    assert compiled is not None
    assert impatient.compile_again(compiled.grammar).may_begin()


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": LARGE},
        {"json": {"enum": [f"value {number} of many" for number in range(8000)]}},
        {
            "json": {
                "type": "array",
                "minItems": 10**6,
                "items": {"type": "array", "minItems": 10**6},
            }
        },
        {"regex": "((a?){50}(a){50}){50}"},
        {"regex": ".*a.{200}b"},
        {"grammar": 'start: (("a"|"b"){1,300}){1,300}'},
        {"grammar": 'start: e\ne: e e | "a" | "b" e | e "c" |  '},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": f'start: r0\n{CHAIN}\nr3500: "a"'},
        {"grammar": f'root ::= r0\n{CHAIN.replace(":", "::=")}\nr3500 ::= "a"'},
        {"json": {"$ref": "#/$defs/d0", "$defs": REFERENCES}},
    ],
    ids=lambda outputs: str(outputs)[:40],
)
def test_a_malicious_grammar_compiles_or_is_refused_in_time(
    bytes_too: ConstraintVocabulary, outputs: dict[str, Any]
) -> None:
    """And neither crashes the process nor raises anything else."""
    with suppress(InvalidRequest):
        assert Compiler(bytes_too).compile(asking(**outputs)) is not None


@pytest.mark.parametrize(
    "outputs",
    [
        {"grammar": 'root ::= "a"{20000}'},
        {"grammar": 'start: a{20000}\na: "a"'},
        {"grammar": f'start: "{"a" * 60_000}"'},
        {"regex": "(ab){3000}"},
        {"json": {"const": "a" * 200_000}},
    ],
    ids=lambda outputs: str(outputs)[:30],
)
def test_a_grammar_forces_no_more_at_once_than_others_can_wait_for(
    bytes_too: ConstraintVocabulary, outputs: dict[str, Any]
) -> None:
    """Once its 20,000 tokens were followed in one call, which held Python's lock for 0.3 s."""
    matcher = Compiler(bytes_too).compile(asking(**outputs))
    assert matcher is not None
    assert 0 < len(matcher.forced) <= MOST_FORCED_BYTES


def test_forced_text_goes_on_after_another_spelling_of_it(bytes_too: ConstraintVocabulary) -> None:
    """A journal may come from a worker of another version."""
    matcher = Compiler(bytes_too).compile(asking(choice=["Once upon a time " * 5]))
    assert matcher is not None
    for byte in b"Once":
        matcher.push(bytes_too.tokens.index(bytes([byte])))
    while not matcher.complete:
        matcher.push(matcher.forced[0])


def test_the_reason_names_json_schemas_words_and_none_of_the_users(
    bytes_too: ConstraintVocabulary,
) -> None:
    schema = {"type": "object", "properties": {"zsecretz": False}, "required": ["zsecretz"]}
    with pytest.raises(InvalidRequest) as caught:
        Compiler(bytes_too).compile(asking(json=schema))
    (fault,) = caught.value.faults
    assert fault.rule == (
        "must compile: Unsatisfiable schema: required property '...' is unsatisfiable"
    )
    with pytest.raises(InvalidRequest, match=r'Unimplemented keys: \["\$dynamicRef"\]'):
        Compiler(bytes_too).compile(asking(json={"$dynamicRef": "#zsecretz"}))


@pytest.mark.parametrize(
    "text",
    [r'{"\u0061": "x"}', r'{"b\/": "x"}', r'{"b": "\u00e9"}', '{"a": "x"}', '{"a": 1, "a": 2}'],
)
def test_no_key_passes_for_another(bytes_too: ConstraintVocabulary, text: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert fits(bytes_too, schema, r'{"a": 1, "b": "\"x\\\n"}')
    assert not fits(bytes_too, schema, text)


def fits(vocabulary: ConstraintVocabulary, schema: dict[str, Any], text: str) -> bool:
    """Whether the whole ``text``, byte by byte, is one that ``schema`` allows."""
    matcher = Compiler(vocabulary).compile(asking(json=schema))
    assert matcher is not None
    try:
        for byte in text.encode():
            matcher.push(vocabulary.tokens.index(bytes([byte])))
    except InvalidRequest:
        return False
    return matcher.complete


@pytest.mark.parametrize(
    "grammar", ['start: e\ne: e e | "a" | e e e', 'root ::= .*.*.*.*.*.*.* "x"']
)
def test_a_grammar_that_grows_ever_more_ambiguous_ends(
    bytes_too: ConstraintVocabulary, grammar: str
) -> None:
    matcher = Compiler(bytes_too).compile(asking(grammar=grammar))
    assert matcher is not None
    letter = bytes_too.tokens.index(b"a")
    bits = np.zeros((1, bytes_too.ll_tokenizer.vocab_size // 32 + 1), np.int32)

    def take_letters() -> None:
        for _ in range(300):
            fill_next_token_bitmask(matcher.ll_matcher, bits, 0)
            matcher.push(letter)

    with pytest.raises(InvalidRequest, match=r"\.grammar: .* \(got more ways to read the text"):
        take_letters()


WITHOUT_ROOM = """
import resource
from pathlib import Path
from llorch_worker.contract import GenerationRequest, OutOfMemory
from llorch_worker.intake.constraints.compiler import MOST_COMPILING, Compiler
from llorch_worker.intake.constraints.vocabulary import ConstraintVocabulary
from tests.text.made_up import made_up_tokenizer

compiler = Compiler(ConstraintVocabulary(made_up_tokenizer(64), 64, frozenset()), patience_s=5)
request = GenerationRequest(prompt="a", structured_outputs={"choice": [" w1 w12"]})
compiler.prepare()
pages = int(Path("/proc/self/statm").read_text().split()[0])
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 64 * 2**20, hard))
for _ in range(MOST_COMPILING + 1):
    try:
        compiler.compile(request)
    except OutOfMemory as error:
        print("no thread" in error.message)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(compiler.compile(request) is not None)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_compilation_that_cannot_start_leaves_its_place() -> None:
    said = printed_by(WITHOUT_ROOM).split()
    assert said == ["True"] * (MOST_COMPILING + 2)


def test_compilations_that_nobody_waits_for_leave_no_place_until_they_end(
    words: ConstraintVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, compile_, end = Compiler(words, patience_s=0.1), Compiler._compile, threading.Event()

    def held(self: Compiler, *asked: Any) -> Any:
        assert end.wait(60)
        return compile_(self, *asked)

    monkeypatch.setattr(Compiler, "_compile", held)
    request = asking(choice=[" w1 w12"])
    for _ in range(MOST_COMPILING):
        with pytest.raises(InvalidRequest, match="must compile within"):
            compiler.compile(request)
    for refused in (request, asking(grammar="root ::= none")):
        # Before it is read.
        with pytest.raises(OutOfMemory, match="other grammars"):
            compiler.compile(refused)
    end.set()
    patient = Compiler(words)
    patient._places = compiler._places
    assert patient.compile(request) is not None
