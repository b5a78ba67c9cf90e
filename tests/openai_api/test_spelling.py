from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llorch_worker.anthropic_api.messages import CountTokensRequest, MessagesRequest
from llorch_worker.contract import Fault, GenerationRequest, InvalidRequest
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.completions import CompletionRequest
from llorch_worker.openai_api.known_fields import KNOWN_FIELDS
from llorch_worker.openai_api.responses_request import ResponseRequest
from llorch_worker.openai_api.shape import faults_of
from llorch_worker.openai_api.tokens import DetokenizeRequest, TokenizeRequest

USER = {"role": "user", "content": "Hi"}
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [USER]},
    ResponseRequest: {"input": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    CountTokensRequest: {"messages": [USER]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
}
BODIES = pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)


def faults(kind: type[BaseModel], **fields: Any) -> list[Fault]:
    try:
        kind.model_validate({**LEAST[kind], **fields})
    except ValidationError as error:
        return faults_of(error.errors())
    return []


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (CompletionRequest, "max_tokns", "max_tokens"),  # a letter is lost,
        (CompletionRequest, "temmperature", "temperature"),  # added,
        (ChatRequest, "temparature", "temperature"),  # wrong
        (ChatRequest, "tempearture", "temperature"),  # or swapped
        (ChatRequest, "maxTokens", "max_tokens"),
        (ChatRequest, "top-p", "top_p"),
        (ChatRequest, "message_s", "messages"),
        (ResponseRequest, "max_output_token", "max_output_tokens"),
        (MessagesRequest, "stop_sequnces", "stop_sequences"),
        (ChatRequest, "stram", "stream"),
        (ChatRequest, "tempreature", "temperature"),
        (CountTokensRequest, "toosl", "tools"),
        (CompletionRequest, "sotp", "stop"),
        (TokenizeRequest, "add_special_token", "add_special_tokens"),
        (DetokenizeRequest, "modle", "model"),
    ],
)
def test_a_known_field_but_for_a_slip_is_refused_with_its_name(
    kind: type[BaseModel], wrong: str, right: str
) -> None:
    (fault,) = faults(kind, **{wrong: 3})
    assert (fault.field, fault.rule) == (wrong, f"unknown field; did you mean {right}?")
    assert faults(kind, **{wrong: None}) == [], "null is not given"


@pytest.mark.parametrize(
    ("kind", "fields", "place"),
    [
        (ChatRequest, {"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        (ResponseRequest, {"text": {"formt": {}}}, "text.formt"),
        (ResponseRequest, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
        (
            ResponseRequest,
            {"tools": [{"type": "function", "name": "f", "paramters": {}}]},
            "tools.0.function.paramters",
        ),
        (MessagesRequest, {"thinking": {"type": "enabled", "dispaly": 1}}, "thinking.dispaly"),
        (MessagesRequest, {"tool_choice": {"type": "tool", "naem": "f"}}, "tool_choice.naem"),
        (MessagesRequest, {"output_config": {"efforts": "low"}}, "output_config.efforts"),
    ],
)
def test_a_slip_is_refused_in_what_is_read_tolerantly(
    kind: type[BaseModel], fields: dict[str, Any], place: str
) -> None:
    assert [fault.field for fault in faults(kind, **fields)] == [place]


def test_a_slip_is_reported_with_all_other_faults() -> None:
    found = faults(ChatRequest, max_tokns=3, stream="{x}", stream_options={"include_usge": 1})
    assert {fault.field for fault in found} == {
        "max_tokns",
        "stream",
        "stream_options.include_usge",
    }


OTHERS = """
adapter_id adapters adaptive_decay adaptive_target add_bos_token additional_drop_params api_base
api_key api_version auto_max_new_tokens ban_eos_token banned_strings banned_tokens base_url
betas bot_name bypass_eos cache cache_salt caching cfg_scale character chat_history
chat_template_content_format citation_options compliance compound_custom connectors container
contents context conversation_id custom_params custom_token_bans data_sources debug deferred
details disable_search do_sample draft_model dry_allowed_length dry_base dry_penalty_last_n
dry_sequence_breakers dynamic_temperature dynatemp_exponent dynatemp_high dynatemp_low
dynatemp_max dynatemp_min enable_search encoder_repetition_penalty enhancements epsilon_cutoff
eta_cutoff exclude_domains extra_body extra_headers fallbacks generationConfig genkey
grammar_lazy grammar_string grammar_triggers greeting guardrails guidance_scale
guided_decoding_backend guided_whitespace_pattern history image_config image_data images
include_domains include_reasoning incremental_output input_ids inputs instances
instruction_template kv_transfer_params litellm_params logits logits_all logprob_start_len
max_input_tokens max_length max_new_tokens max_price max_tokens_second max_tokens_to_sample
mcp_servers media_io_kwargs memory message min_keep min_length min_new_tokens mirostat_eta
mirostat_lr mirostat_mode mirostat_target mirostat_tau mock_response mode model_id model_name
n_discard n_indent n_keep negative_prompt no_repeat_ngram_size no_stop_trim nsigma num_beams
num_ctx num_draft_tokens num_keep num_predict num_retries num_return_sequences parameters
parse_tool_calls penalize_nl penalty_alpha penalty_last_n penalty_prompt
perf_metrics_in_response plugins post_sampling_probs preamble prefix preserved_tokens preset
prompt_embeds prompt_lookup_num_tokens prompt_mode prompt_truncate_len prompts quiet random_seed
raw raw_mode raw_output raw_prompting reasoning_format reasoning_history render_special rep_pen
rep_pen_range rep_pen_slope repeat_last_n repetition_context_size repetition_penalty_range
response_fields result_format return_full_text return_hidden_states return_images return_logprob
return_prompt return_related_questions return_tokens rid route safe_prompt safety_mode
safety_model sampler_order sampler_priority sampler_seq sampling_params sampling_seed
search_domain_filter search_mode search_options search_parameters search_recency_filter
separate_reasoning session_params shift skew smoothing_curve smoothing_factor speculative speed
static_cache stop_sequence stop_token stop_tokens stopping_strings stream_interval
stream_reasoning strict_tools structural_tag system tags temp temperature_last template tfs
tfs_z thinking_budget thinking_token_budget timeout token_healing token_ids_logprob tokens tool
tool_prompt top_n top_n_sigma top_n_tokens top_p_min translation_options trim_stop truncate
truncation_length ttl typ_p typical user_id user_input user_name vllm_xargs watermark
xtc_special_tokens xtc_threshold
"""
"""Fields of llama.cpp, vLLM, SGLang, Text Generation Inference, Ollama, KoboldCpp,
text-generation-webui, TabbyAPI, MLX, LiteLLM, and those that sell answers."""
WORDS = """
N deadline function min samples score see seeds step test texts tokens token tool top users
uses next
"""


@BODIES
def test_no_word_and_no_name_that_a_service_knows_is_taken_for_a_slip(
    kind: type[BaseModel],
) -> None:
    ours = {
        name for body in LEAST for name in body.model_fields
    } | GenerationRequest.model_fields.keys()
    names = {*OTHERS.split(), *WORDS.split(), *KNOWN_FIELDS, *ours} - kind.model_fields.keys()
    assert {
        name: faults(kind, **{name: "x"}) for name in names if faults(kind, **{name: "x"})
    } == {}


@BODIES
@pytest.mark.parametrize("name", ["foo", "x", "nn", "my_tag", "temperatures_of_rooms"])
def test_any_other_name_stays_accepted(kind: type[BaseModel], name: str) -> None:
    assert faults(kind, **{name: 1}) == []


@pytest.mark.parametrize(
    ("fields", "field", "right"),
    [
        ({"max_tokns": 3}, "max_tokns", "max_tokens"),
        ({"response_format": {"tpye": "text"}}, "response_format.tpye", "type"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
        (
            {"tools": [{"function": {"name": "f", "parametrs": {}}}]},
            "tools.0.function.parametrs",
            "parameters",
        ),
    ],
)
def test_what_refuses_all_unknown_fields_says_which_one_was_meant(
    fields: dict[str, Any], field: str, right: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(messages=[USER], **fields)
    rules = {fault.field: fault.rule for fault in caught.value.faults}
    assert rules[field] == f"unknown field; did you mean {right}?"


def test_a_history_of_another_service_may_have_any_fields() -> None:
    turn = {"role": "assistant", "content": "Hi", "contents": 1, "reasonings": 1, "nmae": "x"}
    assert faults(ChatRequest, messages=[turn]) == []
