"""What the tests of llama.cpp's server claim, held against a gateway over a real worker.

Where a test uses a route of llama.cpp's own that OpenAI has too (``/completion``), OpenAI's answers
it. Not here: embeddings, images, slots, its other routes, what only a larger model would answer.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.gateway.claims import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Door,
    Suite,
    at,
    each,
    matches,
    says,
    size,
    some,
)

LLAMA_CPP = Suite()
MODEL = "stories"
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best?"}]
TEXT = "choices.0.message.content"
CALLS = "choices.0.message.tool_calls"
LONG = "Once upon a time there was a little girl. " * 400
CONTEXT = ("maximum context length", "tokens")
ITS_OWN = "a field of llama.cpp's answers; /v1/jobs and traces have the times"


def refused(*words: object) -> dict[str, Any]:
    return {"http": 400, "error.message": says(*words)}


def begins_with_the_role(events: list[Any]) -> bool:
    first, *others = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return (
        first["role"] == "assistant"
        and not first["content"]
        and not any("role" in delta for delta in others)
        and "content" not in others[-1]
        and len({(event["id"], event["model"]) for event in events}) == 1
    )


def joins(choice: Any) -> bool:
    content = choice["logprobs"]["content"]
    text = "".join(token["token"] for token in content)
    scored = all(t["logprob"] <= 0 and t["bytes"] and t["top_logprobs"] for t in content)
    return bool(scored and text == choice["message"]["content"])


def joins_streamed(events: list[Any]) -> bool:
    choices = [event["choices"][0] for event in events]
    tokens = [t for choice in choices for t in (choice["logprobs"] or {}).get("content", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(token["token"] for token in tokens) == text != ""


# fmt: off
ASK: dict[str, Any] = {"model": MODEL, "messages": BOOK, "max_tokens": 8, "temperature": 0}
LLAMA_CPP.rows(CHAT, ASK, "test_chat_completion.py", [
    ("test_chat_completion", {},
     {"id": says("cmpl"), "system_fingerprint": some, "usage.prompt_tokens": some, TEXT: some,
      "usage.completion_tokens": 8, "choices.0.message.role": "assistant",
      "choices.0.finish_reason": "length"}),
    ("test_chat_completion", {"messages": [BOOK[0], {"role": "user", "content": [
        {"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]}]},
     {TEXT: some, "usage.completion_tokens": 8}),
    ("test_chat_completion_stream", {"stream": True},
     {"events": begins_with_the_role, "reasons": ["length"], "done": True}),
    ("test_chat_completion_with_openai_library", {"model": "gpt-3.5-turbo-instruct"},
     {TEXT: some}, "a gateway serves several models; a name that nobody serves is OpenAI's 404"),
    ("test_chat_template_assistant_prefill",
     {"messages": [*BOOK, {"role": "assistant", "content": "Whill"}], "return_token_ids": True},
     {"prompt_token_ids": lambda ids: ids[-1] != 2}),
    ("test_completion_with_response_format",
     {"response_format": {"type": "json_object", "schema": {"const": "42"}}}, {TEXT: '"42"'}),
    ("test_completion_with_response_format",
     {"response_format": {"type": "json_object", "schema": {
         "items": [{"type": "integer"}], "type": "array", "maxItems": 1}}},
     {TEXT: matches(r"\[.*")}),
    ("test_completion_with_response_format",
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "foooo"}}},
      "max_tokens": 20}, {TEXT: '"foooo"'}),
    ("test_completion_with_response_format", {"response_format": {"type": "json_object"}},
     {TEXT: matches(r"\s*\{.*")}),
    *(("test_completion_with_response_format", {"response_format": shape}, {"http": 400})
      for shape in ({"type": "sound"}, {"type": "json_object", "schema": 123},
                    {"type": "json_object", "schema": {"type": 123}},
                    {"type": "json_object", "schema": {"type": "hiccup"}})),
    ("test_completion_with_json_schema", {"json_schema": {"const": "42"}}, {TEXT: '"42"'}),
    ("test_completion_with_grammar", {"grammar": 'root ::= "a"{5,5}'}, {TEXT: "aaaaa"}),
    *(("test_invalid_chat_completion_req", {"messages": messages}, {"http": 400, "error": some})
      for messages in (None, "string", [123], [{}], [{"role": 123}],
                       [{"role": "system", "content": 123}],
                       [{"role": "system", "content": "test"}, {}])),
    ("test_invalid_chat_completion_req",
     {"messages": [*BOOK, *[{"role": "assistant", "content": "test"}] * 2]}, {"http": 400},
     "histories have two answers in a row; only continue_final_message continues one"),
    ("test_chat_completion_with_timings_per_token",
     {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True},
     {"events": begins_with_the_role, "events.-1.usage.completion_tokens": 8}),
    ("test_chat_completion_with_timings_per_token",
     {"stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True},
     {"events.-1.timings.predicted_n": 8}, ITS_OWN),
    ("test_return_progress", {"stream": True, "return_progress": True},
     {"events": lambda events: any("prompt_progress" in event for event in events)}, ITS_OWN),
    ("test_logprobs", {"logprobs": True, "top_logprobs": 10}, {"choices.0": joins}),
    ("test_logprobs_stream", {"logprobs": True, "top_logprobs": 10, "stream": True},
     {"events": joins_streamed}),
    ("test_context_size_exceeded", {"messages": BOOK * 400}, refused(*CONTEXT)),
    ("test_context_size_exceeded_stream", {"messages": BOOK * 400, "stream": True},
     refused(*CONTEXT)),
    ("test_chat_completions_multiple_choices", {"n": 2},
     {"choices": lambda choices: len(choices) == 2 and all(
         choice["message"]["role"] == "assistant" and choice["message"]["content"]
         and choice["finish_reason"] == "length" for choice in choices)}),
])
LIFE: dict[str, Any] = {
    "model": MODEL, "prompt": "I believe the meaning of life is", "max_tokens": 8, "temperature": 0
}
LLAMA_CPP.rows(COMPLETIONS, LIFE, "test_completion.py", [
    ("test_completion", {"return_token_ids": True},
     {"choices.0.text": some, "choices.0.token_ids": each(lambda token: isinstance(token, int)),
      "usage.completion_tokens": 8}),
    ("test_completion_stream", {"stream": True, "stream_options": {"include_usage": True}},
     {"texts.0": some, "events.-1.usage.completion_tokens": 8, "reasons": ["length"]}),
    ("test_completion_with_openai_library", {},
     {"system_fingerprint": some, "choices.0.finish_reason": "length", "choices.0.text": some}),
    ("test_completion_stream_with_openai_library", {"stream": True}, {"texts.0": some}),
    ("test_completion_stream_with_openai_library_stops",
     {"prompt": "Once upon", "max_tokens": 60, "stop": [".", "User:\n"], "stream": True},
     {"texts.0": lambda text: text and "." not in text, "reasons": ["stop"]}),
    ("test_nocache_long_input_prompt", {"prompt": LONG}, refused(*CONTEXT)),
    ("test_completion_with_tokens_input", {"prompt": [[1, 403, 407], "Once"]},
     {"choices": size(2)}),
    ("test_n_probs", {"logprobs": 10, "max_tokens": 5, "temperature": 0},
     {"choices.0.logprobs.top_logprobs": lambda tops: len(tops) == 5 and all(
         len(top) >= 10 and max(top.values()) <= 0 for top in tops)}),
    ("test_n_probs_stream", {"logprobs": 10, "max_tokens": 5, "stream": True},
     {"events.0.choices.0.logprobs.top_logprobs.0": size(10, 11)}),
])
LLAMA_CPP.rows(COMPLETIONS, LIFE, "test_ctx_shift.py", [
    ("test_ctx_shift_disabled_short_prompt", {"prompt": "Hi", "max_tokens": 20, "ignore_eos": True},
     {"usage.completion_tokens": 20, "choices.0.finish_reason": "length"}),
    ("test_ctx_shift_disabled_long_prompt", {"prompt": LONG, "max_tokens": 64}, refused(*CONTEXT)),
])
LLAMA_CPP.rows(COMPLETIONS, LIFE, "test_ignore_eos.py", [
    ("test_ignore_eos_populates_logit_bias", {"ignore_eos": True, "max_tokens": 100},
     {"usage.completion_tokens": 100}),
])


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties),
              "additionalProperties": False}
    function = {"name": name, "description": "", "parameters": schema}
    return {"type": "function", "function": function}


TEST = tool("test", success={"type": "boolean", "const": True})
PYTHON = tool("python", code={"type": "string"})
CALL = {**ASK, "max_tokens": 120, "tool_choice": "required", "parallel_tool_calls": False}
LLAMA_CPP.rows(CHAT, CALL, "test_tool_call.py", [
    ("test_completion_with_required_tool_real_model", {"tools": [TEST]},
     {CALLS: size(1), f"{CALLS}.0.function.name": "test", TEXT: lambda text: not text}),
    ("test_completion_with_required_tool_real_model", {"tools": [TEST], "stream": True},
     {"events": lambda events: [at(e, "choices.0.delta.tool_calls.0.function.name")
                                for e in events].count("test") == 1}),
    *(("test_completion_without_tool_call_fast",
       {"tools": tools, "tool_choice": choice, "max_tokens": 8, "stream": stream},
       {"texts.0": some} if stream else {TEXT: some, CALLS: None})
      for tools, choice in (([], None), (None, None), ([PYTHON], "none"))
      for stream in (False, True)),
    ("test_calc_result", {
        "tools": [tool("calculate", expression={"type": "string"})], "tool_choice": None,
        "max_tokens": 8, "messages": [*BOOK, {
            "role": "assistant", "content": None, "tool_calls": [{
                "id": "call_6789", "type": "function",
                "function": {"name": "calculate", "arguments": '{"expression":"sin(30)"}'}}]},
            {"role": "tool", "name": "calculate", "content": "0.5", "tool_call_id": "call_6789"}]},
     {TEXT: some, CALLS: None}),
])

INPUT = {"model": MODEL, "input": "Write an example", "max_output_tokens": 20, "temperature": 0}
SAID = "output.0.content.0.text"
CONST = {"type": "json_schema", "name": "test", "schema": {"const": "foooo"}}


def keeps_its_ids(events: list[Any]) -> bool:
    response = events[0]["response"]["id"]
    items = {event["item_id"] for event in events if "item_id" in event}
    (item,) = items | {event["item"]["id"] for event in events if "item" in event}
    return bool(response.startswith("resp_") and item.startswith("msg_")
                and response == events[-1]["response"]["id"])


LLAMA_CPP.rows(RESPONSES, INPUT, "test_compat_oai_responses.py", [
    ("test_responses_with_text_format", {"text": {"format": CONST}}, {SAID: '"foooo"'}),
    ("test_responses_with_text_format", {"text": {"format": {"type": "json_object"}}},
     {SAID: matches(r"\s*\{.*")}),
    ("test_responses_with_text_format", {"text": {"format": {"type": "text"}}}, {SAID: some}),
    ("test_responses_with_text_format",
     {"text": {"format": {"type": "json_schema", "name": "test"}}}, {"http": 400, "error": some}),
    ("test_responses_with_openai_library", {"input": BOOK},
     {"id": matches("resp_.*"), "output.0.id": matches("msg_.*"), SAID: some}),
    ("test_responses_stream_with_openai_library", {"input": BOOK, "stream": True},
     {"events": keeps_its_ids}),
    ("test_responses_stream_with_llama_telemetry",
     {"stream": True, "timings_per_token": True, "return_progress": True},
     {"events.-1.timings": some}, ITS_OWN),
])

HELLO = [{"role": "user", "content": "Say hello"}]
WRITE = {"model": MODEL, "max_tokens": 16, "messages": HELLO, "temperature": 0}
WEATHER = {"name": "get_weather", "description": "Weather of a place",
           "input_schema": {"type": "object", "properties": {"location": {"type": "string"}},
                            "required": ["location"]}}
MESSAGE = {"type": "message", "content": some}


def after_a_call(*content: dict[str, Any]) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"location": "Paris"}}
    return {"messages": [{"role": "user", "content": "What's the weather?"},
                         {"role": "assistant", "content": [use]},
                         {"role": "user", "content": list(content)}]}


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny, 25°C"}
STREAM = ["message_start", "content_block_start", "content_block_delta", "content_block_stop",
          "message_delta", "message_stop"]
COUNT = {"input_tokens": some, "output_tokens": None}


def is_a_message_stream(events: list[Any]) -> bool:
    start, end = events[0]["message"], events[-2]
    blocks = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    return bool(
        start["content"] == [] and start["role"] == "assistant" and start["usage"]["input_tokens"]
        and end["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
        and end["usage"]["output_tokens"] > 0 and blocks == stops == list(range(len(blocks)))
    )


LLAMA_CPP.rows(MESSAGES, WRITE, "test_compat_anthropic.py", [
    ("test_anthropic_messages_basic", {},
     {"type": "message", "role": "assistant", "content.0.type": "text", "timings": None,
      "content.0.text": some, "usage.input_tokens": some, "usage.output_tokens": 16,
      "usage.cache_read_input_tokens": lambda read: read >= 0, "stop_reason": "max_tokens"}),
    ("test_anthropic_messages_with_system", {"system": "You are helpful."}, MESSAGE),
    ("test_anthropic_messages_multipart_content", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]}]}, MESSAGE),
    ("test_anthropic_messages_conversation", {"messages": [
        *HELLO, {"role": "assistant", "content": "Hi!"}, *HELLO]}, MESSAGE),
    ("test_anthropic_messages_streaming", {"stream": True},
     {"types": lambda types: set(STREAM) <= set(types), "events": is_a_message_stream}),
    ("test_anthropic_tool_use_basic", {"tools": [WEATHER]}, MESSAGE),
    ("test_anthropic_tool_result", after_a_call(RESULT), {"content.0.type": "text"}),
    ("test_anthropic_tool_result_with_text",
     after_a_call({"type": "text", "text": "Here are the results:"}, RESULT), MESSAGE),
    ("test_anthropic_tool_result_error", after_a_call({**RESULT, "is_error": True}), MESSAGE),
    ("test_anthropic_tool_streaming",
     {"tools": [WEATHER], "tool_choice": {"type": "any"}, "stream": True, "max_tokens": 60},
     {"events": is_a_message_stream}),
    ("test_anthropic_streaming_content_block_indices", {"tools": [WEATHER], "stream": True},
     {"events": is_a_message_stream}),
    ("test_anthropic_vision_format_accepted", {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iV=="}}
    ]}]}, {"http": 400, "error.message": says("image")}),
    ("test_anthropic_stop_sequences", {"stop_sequences": ["\n", "END"]}, {"type": "message"}),
    ("test_anthropic_temperature", {"temperature": 0.5}, MESSAGE),
    ("test_anthropic_top_p", {"top_p": 0.9}, MESSAGE),
    ("test_anthropic_top_k", {"top_k": 40}, MESSAGE),
    ("test_anthropic_missing_messages", {"messages": None}, {"http": 400}),
    ("test_anthropic_empty_messages", {"messages": []}, MESSAGE,
     "Anthropic's own service refuses it"),
    ("test_anthropic_thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, MESSAGE),
    ("test_anthropic_metadata", {"metadata": {"user_id": "u"}}, MESSAGE),
    ("test_anthropic_vs_openai_different_response_format", {},
     {"object": None, "choices": None, "usage.prompt_tokens": None, "type": "message"}),
])
LLAMA_CPP.rows(f"{MESSAGES}/count_tokens", {"model": MODEL, "messages": HELLO},
               "test_compat_anthropic.py", [
    ("test_anthropic_count_tokens", {}, COUNT),
    ("test_anthropic_count_tokens_with_system", {"system": "You are helpful."}, COUNT),
    ("test_anthropic_count_tokens_no_max_tokens", {}, COUNT),
])
LLAMA_CPP.rows("/tokenize", {"model": MODEL}, "test_tokenize.py", [
    ("test_tokenize_with_bos", {"prompt": "What?", "add_special_tokens": True}, {"tokens.0": 1}),
    ("test_tokenize_with_pieces", {"prompt": "unicode 媽 and emoji 🤗", "return_token_strs": True},
     {"token_strs": each(some)}),
])
LLAMA_CPP.held_by({
    "test_tokens.py::test_ids_become_the_engines_text":
        ["test_tokenize.py::test_tokenize_detokenize"],
    "test_openai_client.py::test_a_streamed_completion_is_the_whole_one":
        ["test_completion.py::test_completion_stream_vs_non_stream"],
    "test_openai_client.py::test_many_streams_of_the_async_client_run_at_once":
        ["test_completion.py::test_completion_parallel_slots"],
    "test_openai_client.py::test_models_are_listed": ["test_basic.py::test_server_models"],
    "test_completions.py::test_a_client_that_hangs_up_before_the_first_token_cancels_too":
        ["test_completion.py::test_cancel_request"],
    "test_gateway.py::test_a_gateway_without_a_worker_lives_and_is_not_ready":
        ["test_basic.py::test_server_start_simple"],
    "test_gateway.py::test_keys_are_asked_for_and_revoked_without_a_restart":
        ["test_security.py::test_incorrect_api_key", "test_security.py::test_correct_api_key"],
    "test_messages.py::test_a_key_may_come_as_x_api_key":
        ["test_security.py::test_correct_api_key_anthropic_header"],
    "test_keys.py::test_every_endpoint_but_those_of_health_asks_for_a_key":
        ["test_security.py::test_access_public_endpoint"],
    "test_keys.py::test_other_origins_may_call_only_if_the_operator_says_so":
        ["test_security.py::test_cors_options"],
})
# fmt: on


@LLAMA_CPP.story("test_chat_completion.py::test_logit_bias")
def _(door: Door) -> None:
    words = ["the", "The", "a", "was", "and", "he", "she", "it"]
    text = " " + " ".join(words)
    tokens = door.ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    bias = {str(token): -100 for token in tokens}
    answer = door.ask(CHAT, {**ASK, "logit_bias": bias, "max_tokens": 40})
    assert answer["choices"][0]["message"]["content"]
    assert not set(words) & set(answer["choices"][0]["message"]["content"].split())


@LLAMA_CPP.story("test_completion.py::test_consistent_result_same_seed")
def _(door: Door) -> None:
    body = {**LIFE, "seed": 42, "temperature": 1}
    assert len({at(door.ask(COMPLETIONS, body), "choices.0.text") for _ in range(4)}) == 1


@LLAMA_CPP.story("test_completion.py::test_different_result_different_seed")
def _(door: Door) -> None:
    body = {**LIFE, "temperature": 1, "max_tokens": 20}
    texts = [at(door.ask(COMPLETIONS, {**body, "seed": n}), "choices.0.text") for n in range(4)]
    assert len(set(texts)) == 4


@LLAMA_CPP.story("test_completion.py::test_completion_with_tokens_input, one and several")
def _(door: Door) -> None:
    body = {**LIFE, "max_tokens": 4}
    tokens = door.ask("/tokenize", {"prompt": LIFE["prompt"]})["tokens"]
    one = at(door.ask(COMPLETIONS, {**body, "prompt": tokens}), "choices.0.text")
    for prompts in ([tokens, tokens], [tokens, LIFE["prompt"]]):
        choices = door.ask(COMPLETIONS, {**body, "prompt": prompts})["choices"]
        assert [choice["text"] for choice in choices] == [one, one]


@LLAMA_CPP.story("test_ctx_shift.py::test_ctx_shift_disabled_short_prompt, ..._stream")
def _(door: Door) -> None:
    context = door.ask("/tokenize", {"prompt": "Hi"})["max_model_len"]
    body = {**LIFE, "prompt": [403] * (context - 8), "max_tokens": 256, "ignore_eos": True}
    whole = door.ask(COMPLETIONS, body)
    assert (whole["usage"]["completion_tokens"], whole["usage"]["total_tokens"]) == (8, context)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert door.ask(COMPLETIONS, {**body, "stream": True})["reasons"] == ["length"]


@LLAMA_CPP.story("test_security.py::test_access_static_assets_without_api_key")
def _(door: Door) -> None:
    assert door.keyed.get("/").status_code == 200


@LLAMA_CPP.story(
    "test_security.py::test_access_public_endpoint, /models",
    "which models there are is for callers, as OpenAI has it",
)
def _(door: Door) -> None:
    assert door.keyed.get("/v1/models").status_code == 200


@LLAMA_CPP.story("test_security.py::test_openai_library_correct_api_key")
def _(door: Door) -> None:
    address = f"{str(door.keyed.base_url).rstrip('/')}/v1"
    with OpenAI(api_key=door.key, base_url=address, max_retries=0) as client:
        assert len(client.chat.completions.create(**ASK).choices) == 1


@LLAMA_CPP.story(
    "test_security.py::test_cors_options, any origin",
    "the operator names the origins: LLORCH_GATEWAY_CORS_ORIGINS",
)
def _(door: Door) -> None:
    asked = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    assert door.keyed.options(COMPLETIONS, headers=asked).status_code == 200
