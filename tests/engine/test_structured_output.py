"""Text that must fit a grammar, together with everything else that a request may ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import (
    Event,
    InvalidRequest,
    Tokens,
    decode_event,
    encode_event,
    read_journal,
)
from llorch_worker.engine import Engine
from llorch_worker.engine.sequence import MOST_FORCED
from tests.engine.structured import (
    AS_RECORD,
    RECORD,
    TIMEOUT_S,
    answer,
    asking,
    generated,
    is_record,
)
from tests.engine.together import all_at_once

WORDS = ["alpha", "beta", 'a "quoted"\nline', "ünï😀"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        (AS_RECORD, is_record),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": RECORD}}},
            is_record,
        ),
        ({"structured_outputs": {"choice": WORDS}}, WORDS.__contains__),
        (
            {"structured_outputs": {"regex": "[a-f]{2,5}(-[0-9]{1,3}){2}"}},
            re.compile("[a-f]{2,5}(-[0-9]{1,3}){2}").fullmatch,
        ),
        (
            {
                "structured_outputs": {
                    "grammar": 'start: "(" inner ")"\ninner: start | /[a-z]{1,4}/'
                }
            },
            re.compile(r"\(+[a-z]{1,4}\)+").fullmatch,
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "(" (root | [a-z]{1,4}) ")" # GBNF'}},
            re.compile(r"\(+[a-z]{1,4}\)+").fullmatch,
        ),
    ],
    ids=["json", "response_format", "choice", "regex", "grammar", "gbnf"],
)
def test_the_text_fits(
    engine: Engine, fields: dict[str, Any], fits: Callable[[str], Any], temperature: float
) -> None:
    ((_, text, reason),) = answer(engine, temperature=temperature, **fields)
    if reason == "stop":
        assert fits(text)
    else:
        assert temperature == 0, "a greedy model may repeat itself until the length ends it"


@pytest.mark.parametrize("seed", range(6))
def test_a_text_ends_where_white_space_might_go_on(engine: Engine, seed: int) -> None:
    grammar = 'root ::= num "\\n"\nnum ::= [0-9] ws\nws ::= [ \\n]*'
    end = dict.fromkeys(engine.tokenizer.eos_token_ids, 8)
    fields = {"structured_outputs": {"grammar": grammar}, "logit_bias": end, "seed": seed}
    ((_, text, reason),) = answer(engine, **fields)
    assert reason == "stop"
    assert re.fullmatch(r"[0-9][ \n]*\n", text)


def test_a_json_object_is_one(engine: Engine) -> None:
    # A model that never saw JSON seldom ends a string.
    ends = engine.tokenizer.encode('"}]', add_special_tokens=False)
    fields = {"response_format": {"type": "json_object"}, "logit_bias": dict.fromkeys(ends, 8)}
    for seed in range(4):
        ((_, text, reason),) = answer(engine, **fields, seed=seed)
        assert reason == "stop"
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(300, 400), 100)},
        {"logit_bias": dict.fromkeys(range(512), -100)},
        {"min_tokens": 110},
        {"ignore_eos": True},
        {"ignore_eos": True, "min_tokens": 110},
        {"logprobs": 2},
        {"n": 4},
        {"stop_token_ids": [0]},
        {"stop": ["no such text"]},
        {"priority": "high"},
    ],
    ids=str,
)
def test_the_text_fits_whatever_else_is_asked_for(engine: Engine, fields: dict[str, Any]) -> None:
    for _, text, reason in answer(engine, **AS_RECORD, **fields):
        # min_tokens too: a text that is complete has no room for more.
        assert reason == "stop"
        assert is_record(text)


def test_a_text_that_may_go_on_obeys_min_tokens_and_ignore_eos(engine: Engine) -> None:
    letters = {
        "structured_outputs": {"regex": "[a-z ]+"},
        "max_tokens": 30,
        # It would end as soon as the pattern lets it.
        "logit_bias": dict.fromkeys(engine.tokenizer.eos_token_ids, 100),
    }
    lengths = [len(answer(engine, **letters, seed=seed)[0][0]) for seed in range(3)]
    assert max(lengths) < 30
    for fields in ({"min_tokens": 30}, {"ignore_eos": True}):
        for seed in range(2):
            ((ids, text, _),) = answer(engine, **letters, **fields, seed=seed)
            assert len(ids) == 30
            assert re.fullmatch("[a-z ]+", text)


def test_a_stop_token_ends_a_text_where_the_grammar_lets_it_end(
    engine: Engine, loaded: Any
) -> None:
    (unlike,) = loaded.tokenizer.encode("\n", add_special_tokens=False)[-1:]
    fields = {"stop_token_ids": [unlike], "logit_bias": {unlike: 100}, "temperature": 0}
    ((ids, text, reason),) = answer(engine, structured_outputs={"regex": "ab[a-z]+"}, **fields)
    assert (ids[-1], reason) == (unlike, "stop")
    assert re.fullmatch("ab[a-z]+", text)


def test_a_stop_string_ends_the_text_within_forced_tokens(engine: Engine) -> None:
    ((_, text, reason),) = answer(engine, **AS_RECORD, stop=['"age'])
    assert reason == "stop"
    assert text.startswith('{"name": "')
    assert text.endswith('", ')


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11, 20, 29])
def test_max_tokens_ends_the_text_anywhere(engine: Engine, max_tokens: int) -> None:
    ((whole, _, _),) = answer(engine, **AS_RECORD)
    ((ids, _, reason),) = answer(engine, **AS_RECORD, max_tokens=max_tokens)
    assert ids == whole[:max_tokens]
    assert reason == ("length" if max_tokens < len(whole) else "stop")


def test_log_probabilities_change_no_token_and_are_the_models_own(engine: Engine) -> None:
    ((ids, text, _),) = answer(engine, **AS_RECORD)
    generation = engine.submit(asking(**AS_RECORD, logprobs=1))
    (choice,) = generation.result(TIMEOUT_S).choices
    assert (choice.token_ids, choice.text) == (ids, text)
    prompt = engine.tokenizer.encode("Once upon a time")
    raw = engine.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :].log_softmax(-1)
    assert choice.logprobs is not None
    for entry, row in zip(choice.logprobs, raw, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id].item(), abs=1e-4)
        assert entry.top[0].logprob == pytest.approx(row.max().item(), abs=1e-4)


def test_forced_tokens_come_without_steps_of_their_own(engine: Engine) -> None:
    steps = engine.stats().steps_total
    counted = engine.stats().completion_tokens_total
    ((ids, _, _),) = answer(engine, **AS_RECORD)
    assert engine.stats().completion_tokens_total - counted == len(ids)
    assert engine.stats().steps_total - steps <= len(ids) * 2 / 3


def test_a_step_takes_no_more_forced_tokens_than_the_others_can_wait_for(engine: Engine) -> None:
    text = "Once upon a time there was a dog. " * 10
    generation = engine.submit(asking(structured_outputs={"choice": [text]}))
    tokens = [len(each.ids) for each in generation.events() if isinstance(each, Tokens)]
    ((_, whole, reason),) = generated(generation)
    assert (whole, reason) == (text, "stop")
    assert max(tokens) == 1 + MOST_FORCED


def test_forced_tokens_keep_to_the_steps_budget(
    make_engine: Callable[..., Engine], watched: Callable[..., Any]
) -> None:
    model = watched()
    roomy, narrow = make_engine(), make_engine(model=model, max_sequences=6, max_step_tokens=8)
    requests: list[dict[str, Any]] = [{**AS_RECORD, "seed": seed} for seed in range(6)]
    expected = [answer(roomy, **fields) for fields in requests]
    with all_at_once(narrow):
        generations = [narrow.submit(asking(**fields)) for fields in requests]
    assert [generated(each) for each in generations] == expected
    assert max(map(sum, model.steps)) <= 8


def over_the_wire(events: list[Event]) -> list[Event]:
    return [decode_event(encode_event(event)) for event in events]


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 0}, {"n": 2}, {"stop": ['", "t']}, {"repetition_penalty": 1.2}],
    ids=str,
)
def test_a_job_cut_after_any_token_continues_in_its_grammar(
    engine: Engine, make_engine: Callable[..., Engine], fields: dict[str, Any]
) -> None:
    other = make_engine(max_step_tokens=24)
    request = asking(**AS_RECORD, **fields)
    whole = engine.submit(request, job_id="job")
    expected = generated(whole)
    tokens = [event for event in whole.events() if isinstance(event, Tokens)]
    resumed = [
        other.submit(request, job_id="job", journal=read_journal(over_the_wire(tokens[:cut])))
        for cut in range(0, len(tokens), 2)
    ]
    assert [generated(each) for each in resumed] == [expected] * len(resumed)


def test_a_job_cut_within_forced_tokens_continues_with_them(
    engine: Engine, make_engine: Callable[..., Engine]
) -> None:
    """No journal of ours ends there, but tokens alone decide what comes next."""
    other = make_engine()
    whole = engine.submit(asking(**AS_RECORD), job_id="job")
    ((ids, _, _),) = expected = generated(whole)
    for cut in range(0, len(ids), 2):
        # All text is released late, so that the journal may be cut anywhere.
        events = [Tokens(index=0, ids=ids[:cut], text="")] if cut else []
        resumed = other.submit(asking(**AS_RECORD), job_id="job", journal=read_journal(events))
        assert generated(resumed) == expected


def test_a_journal_that_does_not_fit_the_grammar_is_refused(engine: Engine) -> None:
    journal = read_journal([Tokens(index=0, ids=(300, 301), text="")])
    with pytest.raises(Exception, match="does not fit the grammar"):
        engine.submit(asking(**AS_RECORD), journal=journal)


BAD = {"type": "zsecretz"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$dynamicRef": "#zsecretz"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "#/zsecretz"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"multipleOf": "zsecretz"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"pattern": "(zsecretz"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": "(zsecretz"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "()"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=zsecretz)"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "\ud800"]}}, "structured_outputs.choice.1"),
    ({"structured_outputs": {"grammar": 'start: "\ud800"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "start: zsecretz"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'zsecretz: "a"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'start: start "a"'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <|zsecretz|>"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= zsecretz"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "zsecretz'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "zsecretz\\'}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 9999}}, "structured_outputs.grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=str)
def test_a_grammar_with_an_error_is_refused_with_the_reason(
    engine: Engine, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(asking(**fields))
    (fault,) = caught.value.faults
    assert fault.field == field
    # Errors are logged, and a grammar may be private.
    assert "zsecretz" not in str(caught.value)


# Each text multiplies the ways to read the one before, far beyond the parser's limit.
EXPLOSIVE = {"structured_outputs": {"grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"?'}}


def test_a_grammar_that_explodes_fails_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    alone = answer(engine, **AS_RECORD)
    with all_at_once(engine):
        company = engine.submit(asking(**AS_RECORD))
        # The empty text fits too, and the parser has no trouble with it.
        explosive = engine.submit(asking(**EXPLOSIVE, ignore_eos=True))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.grammar: must stay within"):
        explosive.result(TIMEOUT_S)
    assert generated(company) == alone
