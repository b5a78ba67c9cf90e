"""What vLLM's tests of its entrypoints claim, held against a gateway over a real worker.

Not here: images, audio, adapters, embeddings, vLLM's own routes and settings, classes without a
request, and what only a larger model would answer.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from tests.gateway.claims import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Door,
    Suite,
    as_json,
    at,
    each,
    matches,
    says,
    size,
    some,
)

VLLM = Suite()
MODEL = "stories"
USER = {"role": "user", "content": "Tell me a story"}
HISTORY = [{"role": "system", "content": "Be brief"}, USER]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
NOTHING = {"type": "object", "properties": {}, "required": []}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
GO = {"type": "function", "function": {"name": "go"}}
CONTINUED = {
    "messages": [USER, {"role": "assistant", "content": "Once upon a"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
BYTE = r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
ADDRESS = rf"({BYTE}\.){{3}}{BYTE}"
LANGUAGES = ["Python", "Rust", "C++"]
IDS = [1, 403, 407, 410, 415]
TEXT = "choices.0.message.content"
SCORES = "choices.0.logprobs.content"
CALLS = "choices.0.message.tool_calls"
ANSWERED = {TEXT: some}
WITH_USAGE = {"include_usage": True, "continuous_usage_stats": False}
WITH_ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}

OPENAIS_LAST = "OpenAI's last chunk has only the reason; llama.cpp's tests claim that"
CHANGES_NOTHING = "it changes nothing, so it is accepted"
TOKEN_IDS = "return_token_ids has them"
QUOTES_NOTHING = "an error names a field and sizes, and quotes no text of a request"


def refused(*words: object) -> dict[str, Any]:
    return {"http": 400, "error.message": says(*words)}


def is_person(value: Any) -> bool:
    return value["name"] in ("Lily", "Tom") and value["age"] <= 99


def calls(name: str, arguments: Any) -> dict[str, Any]:
    function = f"{CALLS}.0.function"
    return {f"{function}.name": name, f"{function}.arguments": as_json(arguments)}


def called_back(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "now", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        *HISTORY,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]


def only_the_last(usages: list[Any]) -> bool:
    return usages[:-1] == [None] * (len(usages) - 1) and usages[-1]["completion_tokens"] > 0


def streams_a_person(events: list[Any]) -> bool:
    pieces = [at(event, "choices.0.delta.tool_calls.0.function.arguments") for event in events]
    return is_person(json.loads("".join(filter(None, pieces))))


def adds_up(usage: Any) -> bool:
    return bool(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"])


def has_ids_once(events: list[Any]) -> bool:
    given = [at(event, "choices.0.token_ids") or [] for event in events]
    return "prompt_token_ids" not in events[1] and sum(map(len, given)) == 5


# fmt: off
ASK: dict[str, Any] = {
    "model": MODEL, "messages": HISTORY, "max_completion_tokens": 5, "temperature": 0, "seed": 7
}
VLLM.rows(CHAT, ASK, "test_chat.py", [
    ("test_no_logprobs_chat", {"logprobs": False}, {"choices.0.logprobs": None}),
    ("test_zero_logprobs_chat", {"logprobs": True, "top_logprobs": 0},
     {f"{SCORES}.0.top_logprobs": []}),
    ("test_some_logprobs_chat", {"logprobs": True, "top_logprobs": 5},
     {f"{SCORES}.0.top_logprobs": size(5)}),
    ("test_too_many_chat_logprobs", {"logprobs": True, "top_logprobs": 21, "stream": True},
     refused("top_logprobs")),
    ("test_too_many_chat_logprobs", {"logprobs": True, "top_logprobs": 30},
     refused("top_logprobs")),
    ("test_prompt_logprobs_chat", {"prompt_logprobs": 1}, {"prompt_logprobs": some}),
    ("test_prompt_logprobs_chat", {"prompt_logprobs": 0}, {"prompt_logprobs": some}),
    ("test_prompt_logprobs_chat", {"prompt_logprobs": -1}, refused("prompt_logprobs")),
    ("test_prompt_logprobs_chat", {}, {"prompt_logprobs": None}),
    ("test_more_than_one_prompt_logprobs_chat", {"prompt_logprobs": 2},
     {"prompt_logprobs.3": size(2, 3)}),
    ("test_single_chat_session", {"logprobs": True, "top_logprobs": 5},
     {"id": some, "choices": size(1), "choices.0.finish_reason": "length", "usage": adds_up,
      "usage.completion_tokens": 5, "choices.0.message.role": "assistant", TEXT: some}),
    ("test_single_chat_session",
     {"messages": [*HISTORY, {"role": "assistant", "content": "Once"}, USER]}, ANSWERED),
    ("test_chat_streaming", {"stream": True},
     {"reasons": ["length"], "events.-1.choices.0.finish_reason": "length"}),
    ("test_chat_streaming", {"stream": True}, {"events.-1.choices.0.delta.content": some},
     OPENAIS_LAST),
    ("test_chat_completion_stream_options",
     {"stream": True, "stream_options": {"include_usage": False}},
     {"usages": each(lambda usage: usage is None)}),
    ("test_chat_completion_stream_options", {"stream": True, "stream_options": WITH_USAGE},
     {"usages": only_the_last, "events.-1.choices": []}),
    ("test_chat_completion_stream_options", {"stream_options": WITH_USAGE},
     refused("stream_options"), CHANGES_NOTHING),
    ("test_chat_completion_stream_options",
     {"stream": True, "stream_options": WITH_ALL_USAGE, "min_tokens": 10,
      "max_completion_tokens": 10},
     {"usages": each(adds_up), "events.-1.usage.completion_tokens": 10}),
    ("test_structured_outputs_choice_chat",
     {"structured_outputs": {"choice": LANGUAGES}, "temperature": 0.7},
     {TEXT: LANGUAGES.__contains__}),
    ("test_structured_outputs_json_chat",
     {"structured_outputs": {"json": SCHEMA}, "max_completion_tokens": 60},
     {TEXT: as_json(is_person)}),
    ("test_structured_outputs_regex_chat",
     {"structured_outputs": {"regex": ADDRESS}, "max_completion_tokens": 20},
     {TEXT: matches(ADDRESS)}),
    ("test_structured_outputs_type_error", {"structured_outputs": {"regex": {"1": "Python"}}},
     refused("structured_outputs")),
    ("test_structured_outputs_choice_chat_logprobs",
     {"structured_outputs": {"choice": LANGUAGES}, "logprobs": True, "top_logprobs": 5},
     {f"{SCORES}.0.top_logprobs": each(lambda top: top["logprob"] >= -9999)}),
    ("test_response_format_json_object", {"response_format": {"type": "json_object"}},
     {TEXT: matches(r"\s*\{.*")}),
    ("test_response_format_json_schema",
     {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
      "max_completion_tokens": 60}, {TEXT: as_json(is_person)}),
    ("test_response_format_text", {"response_format": {"type": "text"}}, ANSWERED),
    ("test_extra_fields_allowed", {"messages": [{**USER, "extra_field": "0"}]}, ANSWERED),
    ("test_complex_message_content",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]}, ANSWERED),
    ("test_custom_role", {"messages": [{"role": "my-custom-role", "content": "What?"}]}, ANSWERED,
     "templates drop or mistake a role that OpenAI does not have"),
    ("test_long_seed", {"seed": -(2**63) - 1}, refused("seed")),
    ("test_long_seed", {"seed": 2**63}, refused("seed")),
    ("test_chat_completion_n_parameter_non_streaming",
     {"n": 3, "temperature": 0.7, "max_completion_tokens": 20},
     {"choices": lambda choices: [choice["index"] for choice in choices] == [0, 1, 2]
      and len({choice["message"]["content"] for choice in choices}) > 1}),
    ("test_chat_completion_n_parameter_streaming", {"n": 2, "temperature": 0.7, "stream": True},
     {"texts.0": some, "texts.1": some, "reasons": ["length"] * 2}),
    ("test_chat_completion_n_with_seed", {"n": 2, "temperature": 0.8, "seed": 42},
     {"choices": size(2), TEXT: some, "choices.1.message.content": some}),
    ("test_chat_completion_n_equals_1", {"n": 1}, {"choices": size(1), TEXT: some}),
])
VLLM.rows(CHAT, ASK, "test_chat_echo.py", [
    ("test_chat_session_with_echo_and_continue_final_message", {**CONTINUED, "echo": False},
     {TEXT: lambda text: "Once upon a" not in text}),
    ("test_chat_session_with_echo_and_continue_final_message", {**CONTINUED, "echo": True},
     {TEXT: says("Once upon a")}, "the client has the message; it joins them"),
])
VLLM.rows(CHAT, ASK, "test_chat_error.py", [
    ("test_system_message_accepts_text", {}, ANSWERED),
    ("test_system_message_accepts_text_array",
     {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be"}]}, USER]},
     ANSWERED),
    ("test_json_schema_response_format_missing_schema",
     {"response_format": {"type": "json_schema"}}, refused("json_schema")),
])
VLLM.rows(CHAT, ASK, "test_chat_logit_bias_validation.py", [
    ("test_chat_logit_bias_valid", {"logit_bias": {"511": 1.0}}, ANSWERED),
    ("test_chat_logit_bias_invalid", {"logit_bias": {"999999": 1.0}},
     refused("999999", "logit_bias")),
    ("test_chat_logit_bias_non_integer_key", {"logit_bias": {"not_a_token_id": 50}},
     refused("not_a_token_id", "logit_bias"), QUOTES_NOTHING),
    ("test_chat_logit_bias_non_numeric_value", {"logit_bias": {"1": "no"}}, refused("logit_bias")),
    ("test_chat_logit_bias_multiple_non_integer_keys", {"logit_bias": {"bad1": 5, "bad2": 2}},
     refused("bad1", "bad2"), QUOTES_NOTHING),
])
VLLM.rows(CHAT, ASK, "test_chat_stop_token_ids_validation.py", [
    ("test_chat_stop_token_ids_valid", {"stop_token_ids": [511]}, ANSWERED),
    ("test_chat_stop_token_ids_out_of_vocab", {"stop_token_ids": [999999]}, refused("999999")),
    ("test_chat_stop_token_ids_negative", {"stop_token_ids": [-1]}, refused("stop_token_ids")),
])
VLLM.rows(CHAT, ASK, "test_tool_choice_null.py", [
    ("test_null_tool_choice_defaults_to_auto_like_an_absent_one",
     {"tools": [TOOL], "tool_choice": None}, {"choices": some}),
    ("test_null_tool_choice_without_tools_matches_an_absent_one", {"tool_choice": None}, ANSWERED),
    ("test_null_tool_choice_does_not_conflict_with_structured_outputs",
     {"tool_choice": None, "structured_outputs": {"choice": LANGUAGES}},
     {TEXT: LANGUAGES.__contains__}),
    ("test_invalid_tool_choice_is_still_rejected", {"tool_choice": "bogus", "tools": [TOOL]},
     refused("tool_choice")),
    ("test_invalid_tool_choice_is_still_rejected", {"tool_choice": "auto"},
     refused("tool_choice"), CHANGES_NOTHING),
    ("test_explicit_none_tool_choice_is_untouched", {"tool_choice": "none", "tools": [TOOL]},
     {TEXT: some, CALLS: None}),
])
CALL = {**ASK, "tools": [TOOL], "max_completion_tokens": 80}
VLLM.rows(CHAT, CALL, "test_completion_with_function_calling.py", [
    ("test_function_tool_use", {"tool_choice": "required"}, calls("go", is_person)),
    ("test_function_tool_use", {"tool_choice": GO}, calls("go", is_person)),
    ("test_function_tool_use", {"tool_choice": "required", "stream": True},
     {"events": streams_a_person}),
    ("test_named_tool_use", {"tool_choice": GO, "stream": True},
     {"events": streams_a_person, "texts.0": "", "reasons": size(1)}),
    ("test_no_args_tool_call", {"tools": [NOW]}, {"choices": some}),
    ("test_no_args_tool_call", {"messages": called_back("{}")}, {"choices": some}),
    ("test_no_args_tool_call", {"messages": called_back("")}, {"choices": some}),
    ("test_inconsistent_tool_choice_and_tools", {"tools": None, "tool_choice": GO},
     refused("tool_choice")),
    ("test_inconsistent_tool_choice_and_tools",
     {"tool_choice": {"type": "function", "function": {"name": "stay"}}}, refused("tool_choice")),
    ("test_inconsistent_tool_choice_and_tools", {"tool_choice": {}}, refused("tool_choice")),
    ("test_max_tokens_with_tool_choice_required",
     {"tool_choice": "required", "max_completion_tokens": 1},
     {"choices.0.finish_reason": "length", TEXT: lambda text: not text, CALLS: None}),
    ("test_max_tokens_with_tool_choice_required", {"tool_choice": GO, "max_completion_tokens": 1},
     {"choices.0.finish_reason": "length", TEXT: lambda text: not text}),
])
VLLM.rows(CHAT, ASK, "test_return_token_ids.py", [
    ("test_chat_completion_with_tool_use",
     {"tools": [TOOL], "return_token_ids": True, "logprobs": True},
     {"prompt_token_ids": some, "choices.0.token_ids": size(1, 5)}),
    ("test_chat_completion_with_tool_use", {"tools": [TOOL], "return_token_ids": False},
     {"prompt_token_ids": None, "choices.0.token_ids": None}),
    ("test_chat_completion_with_emoji_and_token_ids",
     {"messages": [{"role": "user", "content": "I love cats 🐱"}], "return_token_ids": True,
      "stream": True}, {"events.0.prompt_token_ids": some, "events": has_ids_once}),
])
VLLM.rows(CHAT, ASK, "test_return_tokens_as_ids.py", [
    ("test_chat_return_tokens_as_token_ids_completion",
     {"return_tokens_as_token_ids": True, "logprobs": True},
     {f"{SCORES}.0.token": matches(r"token_id:\d+")}, TOKEN_IDS),
])

COMPLETE = {"model": MODEL, "prompt": IDS, "max_tokens": 5, "temperature": 0, "seed": 7}
BROKEN = {"type": "object", "properties": {"name": {"type": "string"}, "foo": "bar"}}
GRAMMAR = 'root ::= selectsyntax\nselect ::= "SELECT " column " from "\ncolumn ::= "a" | "b"'
VLLM.rows(COMPLETIONS, COMPLETE, "test_completion.py", [
    ("test_single_completion", {"prompt": "Hello, my name is"},
     {"id": some, "choices": size(1), "choices.0.text": some, "usage": adds_up,
      "choices.0.finish_reason": "length", "usage.completion_tokens": 5,
      "usage.prompt_tokens_details.cached_tokens": lambda cached: cached >= 0}),
    ("test_single_completion", {}, {"choices.0.text": some, "choices.0.prompt_logprobs": None}),
    ("test_completion_truncation_side_controls_prompt_truncation",
     {"truncate_prompt_tokens": 4, "truncation_side": "right", "return_token_ids": True},
     {"choices.0.prompt_token_ids": IDS[:4]}, "the client cuts its prompt"),
    ("test_no_logprobs", {"logprobs": None}, {"choices.0.logprobs": None}),
    ("test_zero_logprobs", {"logprobs": 0}, {"choices.0.logprobs.top_logprobs.0": size(1)}),
    ("test_some_logprobs", {"logprobs": 5}, {"choices.0.logprobs.top_logprobs.0": size(5, 6)}),
    ("test_too_many_completion_logprobs", {"logprobs": 21}, refused("logprobs")),
    ("test_too_many_completion_logprobs", {"logprobs": 30, "stream": True}, refused("logprobs")),
    ("test_prompt_logprobs_completion", {"prompt": ["A cat", "Tom"], "prompt_logprobs": -1},
     refused("prompt_logprobs")),
    ("test_prompt_logprobs_completion", {"prompt": ["A cat", "Tom"], "prompt_logprobs": 0},
     {"choices.0.prompt_logprobs": some, "choices.1.prompt_logprobs": some}),
    ("test_prompt_logprobs_completion", {"prompt": ["A cat", "Tom"], "prompt_logprobs": 1},
     {"choices.0.prompt_logprobs": some, "choices.1.prompt_logprobs": some}),
    ("test_prompt_logprobs_completion", {}, {"choices.0.prompt_logprobs": None}),
    ("test_completion_streaming", {"stream": True},
     {"reasons": ["length"], "events.-1.choices.0.finish_reason": "length"}),
    ("test_completion_streaming", {"stream": True}, {"events.-1.choices.0.text": some},
     OPENAIS_LAST),
    ("test_parallel_no_streaming",
     {"prompt": "What", "n": 3, "temperature": 1, "logprobs": 0, "seed": 42, "max_tokens": 20},
     {"choices": lambda choices: [choice["index"] for choice in choices] == [0, 1, 2]
      and len({choice["text"] for choice in choices}) == 3}),
    ("test_parallel_streaming", {"prompt": "What", "n": 3, "temperature": 1, "stream": True},
     {"texts": size(3), "reasons": size(3)}),
    ("test_completion_stream_options",
     {"stream": True, "stream_options": {**WITH_ALL_USAGE, "include_usage": False}},
     {"usages": each(lambda usage: usage is None)}),
    ("test_completion_stream_options", {"stream": True, "stream_options": WITH_USAGE},
     {"usages": only_the_last, "events.-1.choices": []}),
    ("test_completion_stream_options", {"stream": True, "stream_options": WITH_ALL_USAGE},
     {"usages": each(adds_up), "events.-1.choices": []}),
    ("test_completion_stream_options", {"stream": True, "stream_options": {}},
     {"usages": each(lambda usage: usage is None)}),
    ("test_completion_stream_options", {"stream_options": WITH_USAGE},
     refused("stream_options"), CHANGES_NOTHING),
    ("test_batch_completions", {"prompt": ["Hello, my name is"] * 2},
     {"choices": lambda choices: choices[0]["text"] == choices[1]["text"] and len(choices) == 2}),
    ("test_batch_completions", {"prompt": [IDS] * 2},
     {"choices": lambda choices: choices[0]["text"] == choices[1]["text"] and len(choices) == 2}),
    ("test_batch_completions", {"prompt": [IDS] * 2, "n": 2, "use_beam_search": True},
     {"choices": size(4)}, "beams do not stream, and share no batch with other jobs"),
    ("test_batch_completions", {"prompt": [IDS] * 2, "stream": True},
     {"texts": lambda texts: texts["0"] == texts["1"], "reasons": size(2)}),
    ("test_echo_logprob_completion", {"prompt": "Hello", "echo": True, "logprobs": 1},
     {"choices.0.text": matches("Hello.+"), "choices.0.logprobs.token_logprobs.0": None,
      "choices.0.logprobs.top_logprobs.0": None, "choices.0.logprobs.tokens": size(6, 20)}),
    ("test_echo_logprob_completion", {"echo": True, "logprobs": 0},
     {"choices.0.text": some, "choices.0.logprobs.token_logprobs.0": None,
      "choices.0.logprobs.top_logprobs.1": size(1), "choices.0.logprobs.text_offset": size(10)}),
    ("test_invalid_json_schema", {"structured_outputs": {"json": BROKEN}}, {"http": 400}),
    ("test_invalid_regex", {"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]},
     {"http": 400}),
    ("test_invalid_grammar", {"structured_outputs": {"grammar": GRAMMAR}}, {"http": 400}),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_prompt_validation.py", [
    ("test_empty_prompt", {"prompt": None}, refused("prompt")),
    ("test_out_of_vocab_token_ids", {"prompt": [999999]}, refused("999999", "vocabulary")),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_completion_error.py", [
    ("test_negative_prompt_token_ids_nested", {"prompt": [[-1]]}, refused("prompt", "0")),
    ("test_negative_prompt_token_ids_flat", {"prompt": [-1]}, refused("prompt", "0")),
    ("test_json_schema_response_format_missing_schema",
     {"response_format": {"type": "json_schema"}}, refused("json_schema")),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_empty_prompt_list.py", [
    ("test_empty_prompt_list_rejected", {"prompt": []}, refused("prompt")),
    ("test_nonempty_prompt_list_ok", {"prompt": ["Hello"]}, {"choices.0.text": some}),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_token_in_token_out.py", [
    ("test_token_in_token_out_and_logprobs", {"echo": True, "return_token_ids": True},
     {"choices.0.token_ids": size(5), "choices.0.prompt_token_ids": IDS, "choices.0.text": some},
     "echo needs texts as prompts, or logprobs"),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_return_token_ids.py", [
    ("test_basic_completion_with_emoji",
     {"prompt": "I love 🚀", "logprobs": 1, "return_token_ids": True},
     {"choices.0.prompt_token_ids": size(6, 20), "choices.0.token_ids": size(5)}),
    ("test_basic_completion_with_emoji", {"prompt": "I love 🚀", "return_token_ids": False},
     {"choices.0.prompt_token_ids": None, "choices.0.token_ids": None}),
    ("test_comparison_with_prompt_logprobs_and_logprobs",
     {"prompt": "Hello", "echo": True, "logprobs": 1, "return_token_ids": True,
      "prompt_logprobs": 1},
     {"choices.0.token_ids": size(5), "choices.0.prompt_token_ids": some,
      "choices.0.prompt_logprobs": some, "choices.0.logprobs": some}),
])
VLLM.rows(COMPLETIONS, COMPLETE, "test_return_tokens_as_ids.py", [
    ("test_completion_return_tokens_as_token_ids_completion",
     {"return_tokens_as_token_ids": True, "logprobs": 1, "echo": True},
     {"choices.0.logprobs.tokens": each(lambda token: token.startswith("token_id:"))}, TOKEN_IDS),
])

RESPOND = {"model": MODEL, "input": "Lily went", "max_output_tokens": 5, "temperature": 0}
SAID = "output.0.content.0.text"
TALK = [
    {"role": "system", "content": "Be brief"}, {"role": "user", "content": "5 * 3?"},
    {"role": "assistant", "content": "15."}, {"role": "user", "content": "And by 2?"},
]
FUNCTION = {"type": "function", "name": "go", "parameters": SCHEMA, "strict": True}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": None}
OUTPUT = {
    "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "OK"}],
}
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go"}]}
DONE = {"status": "completed", SAID: some}
TOLD = {**RESPOND, "structured_outputs": {"choice": LANGUAGES}, "max_output_tokens": 20}


def is_a_call(outputs: list[Any]) -> bool:
    (call,) = [each for each in outputs if each["type"] == "function_call"]
    return call["name"] == "go" and is_person(json.loads(call["arguments"]))


def nests(types: list[str]) -> bool:
    """Whether what is opened is closed, inner things first."""
    opens = {"done": ("added", "delta"), "completed": ("created",), "incomplete": ("created",)}
    stack: list[str] = []
    for kind in types:
        name, _, end = kind.rpartition(".")
        if end in opens:
            if stack.pop() not in [f"{name}.{begin}" for begin in opens[end]]:
                return False
        elif end in ("added", "created", "delta") and stack[-1:] != [kind]:
            stack.append(kind)
    return not stack


VLLM.rows(RESPONSES, TOLD, "responses/test_basic.py", [
    ("test_simple_input", {}, DONE),
    ("test_instructions", {"instructions": "End with QED"}, DONE),
    ("test_chat", {"input": TALK}, DONE),
    ("test_chat_with_input_type", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "Hello!"}]}]}, DONE),
    ("test_logprobs", {"include": ["message.output_text.logprobs"], "top_logprobs": 5},
     {"output.0.content.0.logprobs.0.top_logprobs": size(5)}),
    ("test_streaming", {"stream": True},
     {"types.0": "response.created", "types.-1": "response.completed",
      "types": lambda types: "response.output_text.delta" in types}),
])
VLLM.rows(RESPONSES, TOLD, "responses/test_simple.py", [
    ("test_basic", {"reasoning": {"effort": "none"}}, {**DONE, "incomplete_details": None}),
    ("test_reasoning_item", {"input": [ASKED, {**THOUGHT, "id": "x", "content": [
        {"type": "reasoning_text", "text": "A greeting."}]}]}, DONE),
    ("test_input_history_openai_shape_e2e",
     {"input": [ASKED, {**OUTPUT, "id": "msg_1", "status": "completed"},
                {**THOUGHT, "id": "rs_1", "status": "completed"}, ASKED]}, DONE),
    ("test_input_history_openresponses_shape_e2e", {"input": [ASKED, OUTPUT, THOUGHT, ASKED]},
     DONE),
    ("test_streaming_output_consistency", {"stream": True},
     {"events": lambda events: "".join(e["delta"] for e in events if "delta" in e)
      == events[-1]["response"]["output"][0]["content"][0]["text"]}),
    ("test_streaming_logprobs",
     {"stream": True, "top_logprobs": 3, "include": ["message.output_text.logprobs"]},
     {"events": lambda events: each(lambda e: size(1, 20)(e["logprobs"]))(
         [e for e in events if e["type"] == "response.output_text.delta"])}),
    ("test_max_tokens", {"structured_outputs": None},
     {"status": "incomplete", "incomplete_details.reason": "max_output_tokens"}),
    ("test_extra_sampling_params",
     {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 42}, DONE),
    ("test_streaming_types", {"stream": True, "tools": [], "background": False}, {"types": nests}),
    ("test_enable_response_messages", {"enable_response_messages": True},
     {"input_messages.0.type": "raw_message_tokens"}, "/tokenize shows what the model reads"),
])
CALLED = {**RESPOND, "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 80}
VLLM.rows(RESPONSES, CALLED, "responses/test_function_call.py", [
    ("test_function_tool_use", {}, {"output": is_a_call}),
    ("test_max_tokens_with_tool_choice_required", {"max_output_tokens": 3},
     {"incomplete_details.reason": "max_output_tokens",
      "output": lambda output: all(item["type"] != "function_call" for item in output)}),
    ("test_named_tool_use", {"tool_choice": {"type": "function", "name": "go"}},
     {"output": is_a_call}),
    ("test_function_calling_with_streaming_expected_arguments", {"stream": True},
     {"events": lambda events: is_person(json.loads("".join(
         e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")))}),
    ("test_function_calling_with_streaming_types", {"stream": True}, {"types": nests}),
])
FORMAT = {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}
VLLM.rows(RESPONSES, {**RESPOND, "max_output_tokens": 60}, "responses/test_structured_output.py", [
    ("test_structured_output", {"text": {"format": FORMAT}}, {SAID: as_json(is_person)}),
])
VLLM.rows(RESPONSES, RESPOND, "responses/test_stateful.py", [
    ("test_background_error", {"background": True, "store": False}, refused("background")),
])

WRITE = {"model": MODEL, "max_tokens": 16, "messages": [USER], "temperature": 0}
WEATHER = {"name": "go", "description": "Goes somewhere.", "input_schema": SCHEMA}


def blocks(role: str, block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [block]}, USER]}


VLLM.rows(MESSAGES, WRITE, "anthropic/test_messages.py", [
    ("test_simple_messages", {}, {"role": "assistant", "stop_reason": "max_tokens"}),
    ("test_system_message", {"system": "Be brief"}, {"role": "assistant", "content.0.text": some}),
    ("test_anthropic_streaming", {"stream": True},
     {"types.0": "message_start", "types.-1": "message_stop"}),
    ("test_anthropic_tool_call",
     {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 80},
     {"stop_reason": "tool_use", "content.0.name": "go", "content.0.input": is_person}),
    ("test_anthropic_tool_call_streaming",
     {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 80, "stream": True},
     {"types.0": "message_start", "events.-2.delta.stop_reason": "tool_use"}),
])
USE = {"type": "tool_use", "id": "toolu_1", "name": "go", "input": {}}
VLLM.rows(MESSAGES, WRITE, "anthropic/test_content_block_validation.py", [
    *((test, blocks("assistant", {**USE, **block}), {"http": 400}) for test, block in (
        ("test_tool_use_missing_id_raises", {"id": None}),
        ("test_tool_use_empty_id_raises", {"id": ""}),
        ("test_tool_use_missing_name_raises", {"name": None}),
        ("test_tool_use_empty_name_raises", {"name": ""}),
        ("test_tool_use_missing_input_raises", {"input": None}),
        ("test_text_block_none_text_raises", {"type": "text"}),
        ("test_thinking_block_missing_thinking_raises", {"type": "thinking"}),
    )),
    *((test, blocks("assistant", block), {"content": some}) for test, block in (
        ("test_text_block_empty_string_passes", {"type": "text", "text": ""}),
        ("test_thinking_block_valid_passes",
         {"type": "thinking", "thinking": "Hm", "signature": "s"}),
        ("test_thinking_block_no_signature_passes", {"type": "thinking", "thinking": "Hm"}),
        ("test_redacted_thinking_valid_passes", {"type": "redacted_thinking", "data": "x"}),
    )),
    ("test_tool_result_missing_tool_use_id_raises", blocks("user", {"type": "tool_result"}),
     {"http": 400}),
    ("test_tool_use_empty_input_dict_passes", {"messages": [
        USER, {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}]},
     {"content": some}),
])

TURNS = [USER, {"role": "assistant", "content": "Once"}, {"role": "user", "content": "And?"}]
TOKENS = {"tokens": some, "count": some, "max_model_len": some, "token_strs": None}
VLLM.rows("/tokenize", {"model": MODEL}, "serve/tokenize/test_tokenization.py", [
    ("test_tokenize_completions", {"prompt": "A test.", "add_special_tokens": False},
     {**TOKENS, "tokens": lambda ids: ids[0] != 1}),
    ("test_tokenize_completions", {"prompt": "A test.", "add_special_tokens": True},
     {**TOKENS, "tokens.0": 1}),
    *(("test_tokenize_chat", {"messages": TURNS, "add_special_tokens": False, **fields}, TOKENS)
      for fields in ({"add_generation_prompt": True}, {"add_generation_prompt": False})),
    ("test_tokenize_chat", {"messages": TURNS[:2], "continue_final_message": True,
                            "add_generation_prompt": False}, TOKENS),
    ("test_tokenize_chat", {"messages": TURNS, "add_special_tokens": True}, TOKENS,
     "a chat would have them twice; no job reads that"),
    ("test_tokenize_chat_with_tools", {"messages": TURNS, "tools": [TOOL]}, TOKENS),
    ("test_tokenize_with_return_token_strs", {"prompt": "A test!", "return_token_strs": True},
     {"token_strs": lambda strings: strings[0] == "<s>" and len(strings) > 3}),
])
VLLM.held_by({
    "test_tokens.py::test_ids_become_the_engines_text":
        ["serve/tokenize/test_tokenization.py::test_detokenize"],
    "test_tokens.py::test_the_tokenizer_is_described_by_the_names_of_tokenizer_config": [
        "serve/tokenize/test_tokenization.py::test_tokenizer_info_basic",
        "serve/tokenize/test_tokenization.py::test_tokenizer_info_schema",
        "serve/tokenize/test_tokenization.py::test_tokenizer_info_consistency_with_tokenize",
        "serve/tokenize/test_tokenization.py::test_tokenizer_info_chat_template"],
    "test_errors.py::test_bodies_that_are_no_request_are_a_400": [
        "test_non_object_body_validation.py::test_chat_completion_request_rejects_non_object_body"],
    "test_gateway.py::test_a_body_without_its_content_type_is_told_which_one_it_needs":
        ["test_basic.py::test_request_wrong_content_type"],
    "test_gateway.py::test_a_gateway_without_a_worker_lives_and_is_not_ready":
        ["test_basic.py::test_check_health"],
    "test_gateway.py::test_every_answer_has_an_id":
        ["serve/middleware/test_x_request_id.py::test_response_has_one_request_id",
         "serve/middleware/test_optional_middleware.py::test_custom_request_id_header"],
    "test_gateway.py::test_keys_are_asked_for_and_revoked_without_a_restart":
        ["serve/middleware/test_optional_middleware.py::test_passed_api_token"],
    "test_keys.py::test_every_endpoint_but_those_of_health_asks_for_a_key":
        ["serve/middleware/test_optional_middleware.py::test_missing_api_token",
         "serve/middleware/test_optional_middleware.py::test_not_v1_or_v2_path_skips_auth"],
    "test_completions.py::test_a_client_that_hangs_up_cancels_its_stream":
        ["test_basic.py::test_request_cancellation"],
    "test_completions.py::test_a_job_that_fails_before_its_first_token_is_a_status":
        ["test_chat_error.py::test_chat_error_non_stream",
         "test_completion_error.py::test_completion_error_non_stream"],
    "test_completions.py::test_a_job_that_ends_early_ends_its_stream_with_an_error":
        ["test_chat_error.py::test_chat_error_stream",
         "test_completion_error.py::test_completion_error_stream"],
    "test_chat.py::test_a_stream_begins_with_the_role_and_ends_with_a_reason":
        ["test_chat.py::test_chat_streaming"],
    "test_openai_client.py::test_a_streamed_completion_is_the_whole_one":
        ["test_completion.py::test_completion_streaming"],
    "test_openai_client.py::test_ids_and_scores_belong_to_their_prompts":
        ["test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs"],
    "test_batches.py::test_every_line_is_answered_as_its_endpoint_answers":
        ["test_run_batch.py::test_completions"],
    "test_batches.py::test_broken_lines_and_repeated_ids_fail_the_batch_before_any_line_runs":
        ["test_run_batch.py::test_completions_invalid_input"],
    "test_response_conversations.py::test_a_response_that_is_not_stored_is_gone":
        ["responses/test_stateful.py::test_store"],
    "test_response_conversations.py::test_a_conversation_goes_on_as_if_it_were_sent_whole":
        ["responses/test_stateful.py::test_previous_response_id"],
    "test_response_conversations.py::test_a_prompt_is_counted_before_it_is_sent":
        ["responses/test_count_tokens.py::test_count_responses_input_tokens"],
    "test_background_responses.py::test_a_background_response_is_finished_without_its_gateway":
        ["responses/test_stateful.py::test_background"],
    "test_background_responses.py::test_a_running_response_can_be_cancelled":
        ["responses/test_stateful.py::test_background_cancel"],
    "test_background_responses.py::test_only_a_background_response_can_be_cancelled":
        ["responses/test_stateful.py::test_cancel_completed"],
    "test_response_streams.py::test_the_helpers_of_the_async_client":
        ["responses/test_structured_output.py::test_structured_output_with_parse"],
    "test_response_socket.py::test_a_response_has_the_events_of_a_stream":
        ["responses/test_websocket_integration.py::test_websocket_connect_and_receive_events"],
    "test_response_socket.py::test_what_is_wrong_is_named_and_the_connection_goes_on":
        ["responses/test_websocket_integration.py::test_websocket_invalid_json",
         "responses/test_websocket_integration.py::test_websocket_unknown_event_type"],
})
# fmt: on


@VLLM.story("test_chat.py::test_custom_role, for strings and parts")
def _(door: Door) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 1+1?"}]}]
    text = [{"role": "user", "content": "What is 1+1?"}]
    first, second = (door.ask(CHAT, {**ASK, "messages": each}) for each in (parts, text))
    assert at(first, TEXT) == at(second, TEXT)


@VLLM.story(
    "test_completion_text_offset.py::test_stream_text_offset_matches_non_stream_with_stop_holdback"
)
def _(door: Door) -> None:
    body = {**COMPLETE, "logprobs": 0, "stop": ["\n\n"], "max_tokens": 8}
    whole = at(door.ask(COMPLETIONS, body), "choices.0.logprobs.text_offset")
    events = door.ask(COMPLETIONS, {**body, "stream": True})["events"]
    streamed = [at(event, "choices.0.logprobs.text_offset") or [] for event in events]
    assert [*chain(*streamed)] == whole


@VLLM.story("responses/test_stateful.py::test_two_responses_with_same_prev_id")
def _(door: Door) -> None:
    first = door.api.responses.create(**RESPOND)
    both = [door.api.responses.create(**RESPOND, previous_response_id=first.id) for _ in range(2)]
    assert both[0].output_text == both[1].output_text


@VLLM.story("responses/test_simple.py::test_multiturn_history_replay_without_ids_e2e")
def _(door: Door) -> None:
    said = at(door.ask(RESPONSES, TOLD), SAID)
    content = [{"type": "output_text", "text": said}]
    again = [ASKED, {**OUTPUT, "content": content}, THOUGHT, ASKED]
    assert door.ask(RESPONSES, {**TOLD, "input": again})["status"] == "completed"
