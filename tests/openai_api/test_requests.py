"""Bodies of completions and chats become requests of the contract."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llorch_worker.anthropic_api.messages import MessagesRequest
from llorch_worker.contract import GenerationRequest, InvalidRequest
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.known_fields import KNOWN_FIELDS
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import WholeBody, faults_of, read_as
from llorch_worker.openai_api.texts import ScoreBody
from llorch_worker.openai_api.tokens import TokenizeRequest

USER = {"role": "user", "content": "Hi"}
HALF = "\ud800"
"""JSON can escape half of a character, which UTF-8 cannot encode."""
HALF_A_TOKEN = {"token": HALF, "logprob": 0.0, "bytes": [], "top_logprobs": []}
HALF_SCORED = {"type": "output_text", "text": "Hi", "logprobs": [HALF_A_TOKEN]}
TOOL = {"type": "function", "function": {"name": "look_up"}}


def chat(**fields: Any) -> dict[str, Any]:
    """The one request of a chat, without its defaults."""
    (request,) = ChatRequest.model_validate({"messages": [USER], **fields}).to_requests()
    return _wire(request)


def completion(**fields: Any) -> list[dict[str, Any]]:
    """The requests of a completion, without their defaults."""
    body = CompletionRequest.model_validate({"prompt": "Once", **fields})
    return [_wire(request) for request in body.to_requests()]


def _wire(request: GenerationRequest) -> dict[str, Any]:
    """Also without what every request has: the context may bound it."""
    assert request.cut_max_tokens
    return {n: v for n, v in request.wire().items() if n != "cut_max_tokens"}


def faults(kind: type[ChatRequest | CompletionRequest], fields: dict[str, Any]) -> set[str]:
    """The fields that are refused."""
    try:
        kind.model_validate(fields).to_requests()
    except ValidationError as error:
        return {fault.field for fault in faults_of(error.errors())}
    except InvalidRequest as error:
        return {fault.field for fault in error.faults}
    return set()


def test_each_prompt_of_a_completion_is_a_request() -> None:
    assert completion() == [{"prompt": "Once", "max_tokens": 16}]
    assert completion(prompt=["a", "b"], max_tokens=2) == [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "b", "max_tokens": 2},
    ]
    assert [r["prompt_token_ids"] for r in completion(prompt=[1, 2])] == [[1, 2]]
    assert [r["prompt_token_ids"] for r in completion(prompt=[[1], [2]])] == [[1], [2]]


def test_prompts_of_one_completion_have_keys_of_their_own() -> None:
    keys = [r["idempotency_key"] for r in completion(prompt=["a", "b"], idempotency_key="k")]
    assert keys[0] == "k"
    assert keys[1] not in ("k", "k#1"), "which a client may send too"
    assert [r["idempotency_key"] for r in completion(idempotency_key="k")] == ["k"]
    longest = completion(prompt=["a", "b"], idempotency_key="k" * 200)
    assert longest[0]["idempotency_key"] == "k" * 200
    assert len({r["idempotency_key"] for r in longest} | {*keys}) == 4


def test_an_echo_with_logprobs_scores_the_prompt() -> None:
    (request,) = completion(prompt=[1, 2], echo=True, logprobs=1, max_tokens=0)
    assert (request["prompt_logprobs"], request["logprobs"], request["max_tokens"]) == (1, 1, 0)
    (plain,) = completion(echo=True)
    assert "prompt_logprobs" not in plain
    (alone,) = completion(echo=True, max_tokens=0)
    assert alone["prompt_logprobs"] == 0


def test_our_own_fields_go_through_by_their_names() -> None:
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "structured_outputs": {"choice": ["a", "b"]},
        "priority": "low",
        "deadline_s": 3.0,
        "idempotency_key": "k",
        "affinity_key": "tenant 7",
        "speculation": "off",
    }
    assert extras.items() <= chat(**extras).items()
    assert extras.items() <= completion(**extras)[0].items()


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        ({"type": "content", "content": "def f"}, "def f"),
        ({"content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f"}]}, "def f"),
        ("def f", "def f"),
        ("", None),
        ({"content": [{"type": "image"}, 3]}, None),
        ({"type": "content"}, None),
        (3, None),
        (None, None),
    ],
)
def test_a_prediction_is_its_text(prediction: object, text: str | None) -> None:
    assert chat(prediction=prediction).get("prediction") == text
    assert completion(prediction=prediction)[0].get("prediction") == text
    response = ResponseRequest.model_validate({"input": "Hi", "prediction": prediction})
    assert response.to_generation(response.input).prediction == text


def test_names_of_llama_cpp_are_structured_outputs() -> None:
    assert chat(grammar="root ::= x")["structured_outputs"] == {"grammar": "root ::= x"}
    assert chat(json_schema={"const": 1})["structured_outputs"] == {"json": {"const": 1}}
    of_openai = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    for kind in ("json_object", "json_schema"):
        beside = {"type": kind, "schema": {"const": 1}}
        assert chat(response_format=beside) == chat(response_format=of_openai)
    named = {"name": "x", "strict": True}
    of_openai["json_schema"] |= named
    assert chat(response_format=beside | named) == chat(response_format=of_openai)
    assert chat(response_format={"type": "json_object", "schema": None})
    assert completion(response_format=beside)[0]["response_format"]["type"] == "json_schema"
    unused = {"grammar": "", "json_schema": None, "structured_outputs": {"regex": "b"}}
    assert completion(**unused)[0]["structured_outputs"] == {"regex": "b"}


@pytest.mark.parametrize(
    ("kind", "given", "rule"),
    [
        (ChatRequest, {"message": [USER]}, "messages: Field required; did you mean it by message?"),
        (
            CompletionRequest,
            {"prompts": "x"},
            "prompt: Field required; did you mean it by prompts?",
        ),
        (ChatRequest, {"prompt": "x"}, "messages: Field required (got"),
    ],
)
def test_a_missing_field_is_looked_for_among_the_given_ones(
    kind: type[WholeBody], given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_as(kind, given)
    assert caught.value.message.startswith(rule)


SHAPES: dict[str, Any] = {
    "structured_outputs": {"regex": "b"},
    "grammar": "root ::= x",
    "json_schema": {"const": 1},
}


@pytest.mark.parametrize("names", [*combinations(SHAPES, 2), tuple(SHAPES)])
def test_no_form_of_the_text_is_dropped_beside_another(names: tuple[str, ...]) -> None:
    given = {name: SHAPES[name] for name in names}
    assert faults(ChatRequest, {"messages": [USER], **given}) == {" | ".join(names)}
    assert faults(CompletionRequest, {"prompt": "Once", **given}) == {" | ".join(names)}
    response = ResponseRequest.model_validate({"input": "Hi", **given})
    with pytest.raises(InvalidRequest, match="at most one of them"):
        response.to_generation(response.input)


@pytest.mark.parametrize("name", SHAPES)
def test_no_form_of_the_text_is_dropped_beside_a_response_format(name: str) -> None:
    given = {name: SHAPES[name], "response_format": {"type": "json_object"}}
    refused = "response_format | structured_outputs"
    assert faults(ChatRequest, {"messages": [USER], **given}) == {refused}


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"prompt_cache_key": "k"}, "k"),
        ({"prompt_cache_key": "k" * 300}, "k" * 200),
        ({"prompt_cache_key": "k", "affinity_key": "a"}, "a"),
        ({"prompt_cache_key": ""}, None),
    ],
)
def test_openais_cache_key_is_our_affinity_key(fields: dict[str, str], key: str | None) -> None:
    assert chat(**fields).get("affinity_key") == key
    assert completion(**fields)[0].get("affinity_key") == key


def test_fields_that_change_nothing_are_accepted() -> None:
    nothing = {
        **{name: {"a": ["b"]} for name, known in KNOWN_FIELDS.items() if known.harmless},
        **{name: known.no_ops[0] for name, known in KNOWN_FIELDS.items() if known.no_ops},
        **dict.fromkeys(("temperature", "audio", "guided_json", "nobody", "stream_options")),
        "stream": True,
        "stop": "",
        "seed": -1,
        "top_k": -1,
        "n": 1,
        "best_of": 1,
        "add_generation_prompt": True,
        "tool_choice": "auto",
        "tools": [],
        "logit_bias": {},
        "top_logprobs": 0,
        "response_format": {"type": "text", "json_schema": None},
        "structured_outputs": None,
    }
    of_chats = {"add_generation_prompt", "tool_choice", "tools", "top_logprobs"}
    wire = chat(**nothing)
    assert wire.pop("add_generation_prompt")
    shape = {"logit_bias": {}, "response_format": {"type": "text"}}
    assert wire == {**chat(), **shape}
    of_completions = completion(**{n: v for n, v in nothing.items() if n not in of_chats})
    assert of_completions == [{**completion()[0], **shape}]


@pytest.mark.parametrize("kind", [ResponseRequest, MessagesRequest])
def test_one_answer_may_be_asked_for_where_there_is_only_one(kind: type[WholeBody]) -> None:
    assert kind.model_validate(SMALLEST[kind] | {"n": 1}).refusals() == []
    with pytest.raises(ValidationError):
        kind.model_validate(SMALLEST[kind] | {"n": 2})


def test_what_stands_beside_a_tools_function_and_in_it_is_dropped() -> None:
    function = TOOL["function"] | {"return": {"type": "string"}, "additionalProperties": False}
    marked = TOOL | {"cache_control": {"type": "ephemeral"}, "function": function}
    assert chat(tools=[marked]) == chat(tools=[TOOL])
    question = TokenizeRequest.model_validate({"messages": [USER], "tools": [marked]}).question()
    plain = TokenizeRequest.model_validate({"messages": [USER], "tools": [TOOL]}).question()
    assert question == plain
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[TOOL | {"function": {"name": "f", "paramters": {}}}])
    (fault,) = caught.value.faults
    assert fault.field == "tools.0.function.paramters"
    assert fault.rule == "unknown field; did you mean parameters?"
    with pytest.raises(InvalidRequest, match=r"tools\.0\.function\.inputSchema"):
        chat(tools=[TOOL | {"function": {"name": "f", "inputSchema": {"type": "object"}}}])


def test_options_of_a_stream_that_nobody_knows_are_ignored() -> None:
    given = {"include_usage": None, "include_obfuscation": False, "unknown": 1}
    body = ChatRequest.model_validate({"messages": [USER], "stream_options": given})
    assert body.stream_options is not None
    assert not body.stream_options.include_usage


def test_what_nobody_knows_is_named_and_refused_where_that_is_asked_for() -> None:
    body = ChatRequest.model_validate(
        {"messages": [USER], "user": "u", "warmth": 1, "nothing": None}
    )
    body.to_requests()
    assert body.ignored == ["warmth"]
    with pytest.raises(InvalidRequest) as caught:
        body.refuse_unknown()
    assert [fault.field for fault in caught.value.faults] == ["warmth"]


def test_the_pages_about_requests_and_http_name_every_field() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = (docs / "HTTP.md").read_text()

    def names(row: str) -> set[str]:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
        return set(re.findall(r"`(\w+)`", line))

    assert names("accepted, without effect") <= {n for n, k in KNOWN_FIELDS.items() if k.harmless}
    assert names("refused") <= {n for n, known in KNOWN_FIELDS.items() if not known.harmless}
    table = (docs / "REQUESTS.md").read_text().partition("| field |")[2].partition("\n\n")[0]
    firsts = "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    of_jobs = set(re.findall(r"`(\w+)`", firsts))
    assert of_jobs == set(GenerationRequest.model_fields)
    done = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert done <= names("with effect") | of_jobs


def test_parts_of_text_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}, USER])
    assert request["messages"] == [{"role": "system", "content": "a\nb"}, USER]


def test_an_effort_becomes_variables_of_the_template_behind_those_of_the_client() -> None:
    kwargs = chat(reasoning_effort="low")["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    kwargs = chat(reasoning_effort="none", chat_template_kwargs={"a": 1})["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False, "a": 1}
    kwargs = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert kwargs["chat_template_kwargs"]["enable_thinking"] is False
    kwargs = chat(reasoning_effort="max")["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": "xhigh", "enable_thinking": True}
    body = {"input": "Hi", "reasoning": {"effort": "high"}}
    request = ResponseRequest.model_validate(body)
    assert request.to_generation(request.input).chat_template_kwargs == {
        "reasoning_effort": "high",
        "enable_thinking": True,
    }
    assert "chat_template_kwargs" not in chat()


def test_a_turn_that_goes_on_is_asked_for_as_in_vllm() -> None:
    turns = [USER, {"role": "assistant", "content": "Once"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(messages=turns, **fields).items() >= fields.items()
    both = {"messages": turns, **fields, "add_generation_prompt": True}
    assert faults(ChatRequest, both) == {"add_generation_prompt"}


def test_an_answer_with_calls_becomes_a_turn() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{**call, "index": 0}],
    }
    turns = [USER, answer, {"role": "tool", "tool_call_id": "c1", "content": "found"}]
    messages = chat(messages=turns, tools=[TOOL])["messages"]
    assert messages[1]["tool_calls"] == [{"id": "c1", "function": call["function"]}]
    assert messages[2] == turns[2]


CALL = {"id": "c1", "function": {"name": "look_up", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "a"}
CALLS = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("turn", "read"),
    [
        ({**USER, "name": "Ann"}, {**USER, "name": "Ann"}),
        ({**SAID, "name": "", "audio": None, "tool_calls": [], "function_call": None}, SAID),
        ({**SAID, "annotations": [], "index": 0, "provider_specific_fields": {"a": 1}}, SAID),
        ({**SAID, "reasoning": "t"}, {**SAID, "reasoning_content": "t"}),
        ({**SAID, "reasoning": {"effort": "low"}, "reasoning_details": [{}]}, SAID),
        ({**SAID, "reasoning_content": "t", "reasoning": "u"}, {**SAID, "reasoning_content": "t"}),
        ({**USER, "reasoning_content": "t", "unknown": None}, USER),
        ({**USER, "tool_call_id": ""}, USER),
        ({**SAID, "tool_call_id": "c1"}, SAID),
        ({"role": "assistant", "content": None, "refusal": "a"}, SAID),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, SAID),
        ({"role": "assistant", "content": None}, {**SAID, "content": ""}),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {**SAID, "reasoning_content": "t"},
        ),
        ({**CALLS, "content": None}, CALLS),
        *(
            (
                {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": given}}]},
                {**CALLS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": read}}]},
            )
            for given, read in (("", ""), (None, ""), ("{", "{"), ({"a": "ü"}, '{"a": "ü"}'))
        ),
        (
            {**CALLS, "tool_calls": [{**CALL, "id": "c" * 5_000, "extra_content": {"google": 1}}]},
            {**CALLS, "tool_calls": [{**CALL, "id": "c" * 5_000}]},
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": None},
            {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": ""},
        ),
    ],
)
def test_a_history_from_elsewhere_is_read(turn: dict[str, Any], read: dict[str, Any]) -> None:
    assert chat(messages=[USER, turn])["messages"] == [USER, read]


def test_results_without_an_id_answer_the_calls_without_one_in_order() -> None:
    function = {"name": "go", "arguments": "{}"}
    calls = [{"id": "", "function": function}, {"id": "a", "function": function}]
    called = [*calls, {"function": function}]
    ids = ("", "a", None)
    results = [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ids]
    turns = chat(messages=[USER, {"role": "assistant", "tool_calls": called}, *results])["messages"]
    expected = ["call_0", "a", "call_1"]
    assert [call["id"] for call in turns[1]["tool_calls"]] == expected
    assert [turn["tool_call_id"] for turn in turns[2:]] == expected
    items: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": "", **function},
        {"type": "function_call_output", "call_id": "", "output": "x"},
    ]
    response = ResponseRequest.model_validate({"input": items})
    read = response.to_generation(response.input).wire()["messages"]
    assert read[0]["tool_calls"][0]["id"] == read[1]["tool_call_id"] == "call_0"


def ids_of(*turns: dict[str, Any]) -> list[str]:
    """The ids of calls and results, in order."""
    ids = []
    for turn in chat(messages=[USER, *turns])["messages"][1:]:
        ids += [call["id"] for call in turn.get("tool_calls", ())]
        ids += [turn["tool_call_id"]] if turn["role"] == "tool" else []
    return ids


def calling(*calls: tuple[str, str | None]) -> dict[str, Any]:
    made = [{"id": id_, "function": {"name": name, "arguments": "{}"}} for name, id_ in calls]
    return {"role": "assistant", "tool_calls": made}


RESULT = {"role": "tool", "content": "x"}


def test_a_result_without_an_id_answers_no_call_of_an_earlier_turn() -> None:
    unanswered = calling(("go", None), ("go", None))
    expected = ["call_0", "call_1", "call_0", "call_2", "call_2"]
    assert ids_of(unanswered, RESULT, calling(("go", None)), RESULT) == expected
    with pytest.raises(InvalidRequest, match=r"messages\.3: tool_call_id"):
        chat(messages=[USER, unanswered, USER, RESULT])


def test_no_id_is_made_that_the_history_has() -> None:
    turns = [calling(("go", None)), RESULT, calling(("go", "call_0")), RESULT]
    turns[-1] = {**RESULT, "tool_call_id": "call_0"}
    assert ids_of(*turns) == ["call_1", "call_1", "call_0", "call_0"]


def test_a_result_without_an_id_answers_the_call_of_its_name() -> None:
    named = [{**RESULT, "name": name} for name in ("b", "other", "b")]
    ids = ids_of(calling(("a", None), ("b", None), ("b", None)), *named)
    assert ids == ["call_0", "call_1", "call_2", "call_1", "call_0", "call_2"]


def test_logprobs_of_a_chat_are_asked_for_by_two_fields() -> None:
    assert chat(logprobs=True)["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3)["logprobs"] == 3
    assert "logprobs" not in chat(logprobs=False)


def test_either_name_of_the_length_is_taken() -> None:
    assert chat(max_tokens=5)["max_tokens"] == chat(max_completion_tokens=5)["max_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{**USER, "name": "A" * 300}]}, "messages.0.name"),
        ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages.0.audio"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"stop": 3}, "stop"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens | max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "b" * 17_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"guided_json": {}}, "guided_json"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_a_chat_refuses_what_it_cannot_do(fields: dict[str, Any], refused: str) -> None:
    assert refused in faults(ChatRequest, {"messages": [USER], **fields})


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [[1], [-1]]}, "prompt.1.0"),
        ({"prompt": ["a"] * 1_025}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_completion_refuses_what_it_cannot_do(fields: dict[str, Any], refused: str) -> None:
    assert refused in faults(CompletionRequest, {"prompt": "Once", **fields})


SMALLEST: dict[type[WholeBody], dict[str, Any]] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "Once"},
    MessagesRequest: {"messages": [USER], "max_tokens": 8},
    ResponseRequest: {"input": "Once"},
}


@pytest.mark.parametrize("kind", SMALLEST)
def test_a_field_of_another_body_is_refused_by_the_name_that_it_has_here(
    kind: type[WholeBody],
) -> None:
    def rules(**fields: Any) -> dict[str, str]:
        found = kind.model_validate(SMALLEST[kind] | fields).refusals()
        return {fault.field: fault.rule for fault in found}

    for name, known in kind.of_others.items():
        assert name not in kind.model_fields
        assert known.instead in rules(**{name: "x"})[name]
        for value in known.no_ops:
            assert rules(**{name: value}) == {}


@pytest.mark.parametrize("kind", [*SMALLEST, ScoreBody, TokenizeRequest])
def test_what_a_refusal_says_to_send_is_a_field_that_is_taken(kind: type[WholeBody]) -> None:
    document = SMALLEST.get(kind, {"text_1": "x", "text_2": "y", "prompt": "x"})
    names = {*KNOWN_FIELDS, *kind.of_others} - kind.model_fields.keys()
    body = kind.model_validate(document | dict.fromkeys(names, "x"))
    rules = [fault.rule for fault in body.refusals()]
    assert len(rules) > 20
    for rule in rules:
        said = re.fullmatch(r"unsupported; send ([\w.]+(?: or [\w.]+)*)", rule)
        for instead in said[1].split(" or ") if said else ():
            field = kind.model_fields[instead.partition(".")[0]]
            assert field.annotation is not type(None), rule


@pytest.mark.parametrize(
    ("kind", "name", "value", "instead"),
    [
        (ResponseRequest, "max_tokens", 5, "max_output_tokens"),
        (ResponseRequest, "response_format", {"type": "json_object"}, "text.format"),
        (ResponseRequest, "reasoning_effort", "low", "reasoning.effort"),
        (ResponseRequest, "think", True, "reasoning.effort"),
        (ResponseRequest, "n_probs", 2, "top_logprobs"),
        (MessagesRequest, "response_format", {"type": "json_object"}, "output_config.format"),
        (MessagesRequest, "reasoning_effort", "low", "output_config.effort"),
        (MessagesRequest, "reasoning", {"effort": "low"}, "output_config.effort"),
        (MessagesRequest, "think", True, "thinking"),
        (ChatRequest, "max_output_tokens", 5, "max_completion_tokens"),
        (ChatRequest, "stop_sequences", ["x"], "stop"),
        (CompletionRequest, "max_completion_tokens", 5, "max_tokens"),
    ],
)
def test_what_would_change_an_answer_elsewhere_is_not_dropped(
    kind: type[WholeBody], name: str, value: object, instead: str
) -> None:
    (fault,) = kind.model_validate(SMALLEST[kind] | {name: value}).refusals()
    assert (fault.field, fault.rule) == (name, f"unsupported; send {instead}")


def test_every_chat_takes_variables_of_the_template() -> None:
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    response = ResponseRequest.model_validate(
        {"input": "x", "reasoning": {"effort": "low"}, **given}
    )
    variables = response.to_generation(response.input).chat_template_kwargs
    assert variables == {"enable_thinking": False, "reasoning_effort": "low"}
    message = {**SMALLEST[MessagesRequest], "thinking": {"type": "enabled"}, **given}
    (request,) = MessagesRequest.model_validate(message).to_requests()
    assert request.chat_template_kwargs == {"enable_thinking": False}


def test_the_faults_of_one_request_are_reported_together() -> None:
    fields = {"prompt": "a", "temperature": 3, "n": 0, "best_of": 7, "suffix": "b"}
    assert faults(CompletionRequest, fields) == {"temperature", "n", "best_of", "suffix"}


def test_a_refused_name_of_an_older_field_comes_with_the_new_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(guided_json={})
    (fault,) = caught.value.faults
    assert fault.rule == "unsupported; send structured_outputs.json"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": HALF},
        {"safety_identifier": HALF},
        {"prompt_cache_key": HALF},
        {"previous_response_id": HALF},
        {"metadata": {HALF: "x"}},
        {"metadata": {"x": HALF}},
        {"input": [{"id": HALF, "role": "user", "content": "Hi"}]},
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": HALF}]}]},
        {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": HALF}]}]},
        {"input": [{"role": "assistant", "content": [HALF_SCORED]}]},
    ],
)
def test_half_a_character_is_refused_where_it_would_be_stored(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="must be text that UTF-8 can encode"):
        ResponseRequest.model_validate({"input": "Hi", **fields})


@pytest.mark.parametrize("wrong", [{"name": HALF}, {"parameters": {"title": HALF}}])
def test_half_a_character_is_refused_in_tools_that_may_not_be_called(wrong: dict[str, Any]) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": []}
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", **wrong}]
    body = ResponseRequest.model_validate({"input": "x", "tools": tools, "tool_choice": choice})
    with pytest.raises(InvalidRequest) as caught:
        body.to_generation(body.input)
    assert [fault.field for fault in caught.value.faults] == ["tools.1"]


@pytest.mark.parametrize("content", [HALF, {"a": HALF}, 5])
def test_what_another_service_encrypted_is_passed_over_if_it_is_no_text(content: object) -> None:
    thought = {"type": "reasoning", "encrypted_content": content}
    (item,) = ResponseRequest.model_validate({"input": [thought]}).input
    assert '"encrypted_content":null' in item.model_dump_json()


@pytest.mark.parametrize(
    ("body", "fields", "kind"),
    [
        (ChatRequest, {"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "image_url"),
        (ResponseRequest, {"input": [{**USER, "content": [{"type": "input_file"}]}]}, "input_file"),
        (
            ResponseRequest,
            # What Codex's tool view_image gives.
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": "data:image/png;base64,"}],
                    },
                ]
            },
            "input_image",
        ),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(
    body: type[WholeBody], fields: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(fields)
    (fault,) = caught.value.errors()
    assert fault["msg"] == f"must be a text; {kind} is not read here"
