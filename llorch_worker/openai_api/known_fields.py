"""Fields of requests that no body declares, because nothing is done about them here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Known(NamedTuple):
    """A field that other services have."""

    harmless: bool = False
    """Whether every value of it changes nothing here."""
    no_ops: tuple[Any, ...] = ()
    """The values that change nothing, where others would."""
    instead: str = ""
    """What to send in place of it."""

    @property
    def rule(self) -> str:
        """Why it is refused."""
        return (
            f"unsupported; send {self.instead}" if self.instead else "unknown or unsupported field"
        )

    def changes_nothing(self, value: Any) -> bool:
        return self.harmless or value in self.no_ops


KNOWN_FIELDS: dict[str, Known] = {
    # About the account, the log or the speed.
    **dict.fromkeys(
        (
            *("cache_prompt", "client_metadata", "expires_after", "id_slot", "keep_alive"),
            *("metadata", "output_expires_after", "prompt_cache_options"),
            *("prompt_cache_retention", "provider", "request_id", "return_progress"),
            *("safety_identifier", "service_tier", "session_id", "store", "timings_per_token"),
            *("trace", "usage", "user", "verbosity"),
        ),
        Known(harmless=True),
    ),
    # OpenAI's.
    "audio": Known(),
    "function_call": Known(no_ops=("auto", "none"), instead="tool_choice"),
    "functions": Known(no_ops=([],), instead="tools"),
    "modalities": Known(no_ops=(["text"],)),
    "moderation": Known(),
    "suffix": Known(no_ops=("",)),
    "web_search_options": Known(),
    # vLLM's.
    "allowed_token_ids": Known(),
    "bad_words": Known(no_ops=([],)),
    "chat_template": Known(),
    "documents": Known(no_ops=([],)),
    "early_stopping": Known(no_ops=(False,)),
    "guided_choice": Known(instead="structured_outputs.choice"),
    "guided_grammar": Known(instead="structured_outputs.grammar"),
    "guided_json": Known(instead="structured_outputs.json"),
    "guided_regex": Known(instead="structured_outputs.regex"),
    "length_penalty": Known(no_ops=(1,)),
    "logits_processors": Known(no_ops=([],)),
    "mm_processor_kwargs": Known(no_ops=({},)),
    "return_tokens_as_token_ids": Known(no_ops=(False,)),
    "spaces_between_special_tokens": Known(no_ops=(True,)),
    "truncate_prompt_tokens": Known(),
    "use_beam_search": Known(no_ops=(False,)),
    # llama.cpp's and Ollama's.
    "dry_multiplier": Known(no_ops=(0,)),
    "dynatemp_range": Known(no_ops=(0,)),
    "format": Known(no_ops=("",), instead="response_format"),
    "lora": Known(no_ops=([],)),
    "mirostat": Known(no_ops=(0,)),
    "n_predict": Known(no_ops=(-1,), instead="max_tokens"),
    "n_probs": Known(no_ops=(0,), instead="logprobs"),
    "options": Known(no_ops=({},)),
    "repeat_penalty": Known(no_ops=(1,), instead="repetition_penalty"),
    "samplers": Known(),
    "think": Known(instead="reasoning_effort"),
    "typical_p": Known(no_ops=(1,)),
    "xtc_probability": Known(no_ops=(0,)),
    # Of SGLang, OpenRouter and other services.
    "ebnf": Known(instead="structured_outputs.grammar"),
    "enable_thinking": Known(instead="chat_template_kwargs.enable_thinking"),
    "lora_path": Known(),
    "models": Known(no_ops=([],), instead="model"),
    "reasoning": Known(no_ops=({},), instead="reasoning_effort"),
    "regex": Known(instead="structured_outputs.regex"),
    "stop_regex": Known(no_ops=("", [])),
    "thinking": Known(instead="reasoning_effort"),
    "top_a": Known(no_ops=(0,)),
    "transforms": Known(no_ops=([],)),
}
"""Those that are not harmless are refused. docs/HTTP.md names the usual ones and links here."""

UNKNOWN = Known()
"""Any other field. It is ignored unless the settings refuse it."""

ELSEWHERE = frozenset((
    "adapter_id", "adapters", "adaptive_decay", "adaptive_target", "add_bos_token",
    "additional_drop_params", "api_base", "api_key", "api_version", "auto_max_new_tokens",
    "ban_eos_token", "banned_strings", "banned_tokens", "base_url", "betas", "bot_name",
    "bypass_eos", "cache", "cache_salt", "caching", "cfg_scale", "character", "chat_history",
    "chat_template_content_format", "citation_options", "compliance", "compound_custom",
    "connectors", "container", "contents", "context", "conversation_id", "custom_params",
    "custom_token_bans", "data_sources", "debug", "deferred", "details", "disable_search",
    "do_sample", "draft_model", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynamic_temperature", "dynatemp_exponent", "dynatemp_high",
    "dynatemp_low", "dynatemp_max", "dynatemp_min", "enable_search", "encoder_repetition_penalty",
    "enhancements", "epsilon_cutoff", "eta_cutoff", "exclude_domains", "extra_body",
    "extra_headers", "fallbacks", "generationConfig", "genkey", "grammar_lazy", "grammar_string",
    "grammar_triggers", "greeting", "guardrails", "guidance_scale", "guided_decoding_backend",
    "guided_whitespace_pattern", "history", "image_config", "image_data", "images",
    "include_domains", "include_reasoning", "incremental_output", "input_ids", "inputs",
    "instances", "instruction_template", "kv_transfer_params", "litellm_params", "logits",
    "logits_all", "logprob_start_len", "max_input_tokens", "max_length", "max_new_tokens",
    "max_price", "max_tokens_second", "max_tokens_to_sample", "mcp_servers", "media_io_kwargs",
    "memory", "message", "min_keep", "min_length", "min_new_tokens", "mirostat_eta", "mirostat_lr",
    "mirostat_mode", "mirostat_target", "mirostat_tau", "mock_response", "mode", "model_id",
    "model_name", "n_discard", "n_indent", "n_keep", "negative_prompt", "no_repeat_ngram_size",
    "no_stop_trim", "nsigma", "num_beams", "num_ctx", "num_draft_tokens", "num_keep", "num_predict",
    "num_retries", "num_return_sequences", "parameters", "parse_tool_calls", "penalize_nl",
    "penalty_alpha", "penalty_last_n", "penalty_prompt", "perf_metrics_in_response", "plugins",
    "post_sampling_probs", "preamble", "prefix", "preserved_tokens", "preset", "prompt_embeds",
    "prompt_lookup_num_tokens", "prompt_mode", "prompt_truncate_len", "prompts", "quiet",
    "random_seed", "raw", "raw_mode", "raw_output", "raw_prompting", "reasoning_format",
    "reasoning_history", "render_special", "rep_pen", "rep_pen_range", "rep_pen_slope",
    "repeat_last_n", "repetition_context_size", "repetition_penalty_range", "response_fields",
    "result_format", "return_full_text", "return_hidden_states", "return_images", "return_logprob",
    "return_prompt", "return_related_questions", "return_tokens", "rid", "route", "safe_prompt",
    "safety_mode", "safety_model", "sampler_order", "sampler_priority", "sampler_seq",
    "sampling_params", "sampling_seed", "search_domain_filter", "search_mode", "search_options",
    "search_parameters", "search_recency_filter", "separate_reasoning", "session_params", "shift",
    "skew", "smoothing_curve", "smoothing_factor", "speculative", "speed", "static_cache",
    "stop_sequence", "stop_token", "stop_tokens", "stopping_strings", "stream_interval",
    "stream_reasoning", "strict_tools", "structural_tag", "system", "tags", "temp",
    "temperature_last", "template", "tfs", "tfs_z", "thinking_budget", "thinking_token_budget",
    "timeout", "token_healing", "token_ids_logprob", "tokens", "tool", "tool_prompt", "top_n",
    "top_n_sigma", "top_n_tokens", "top_p_min", "translation_options", "trim_stop", "truncate",
    "truncation_length", "ttl", "typ_p", "typical", "user_id", "user_input", "user_name",
    "vllm_xargs", "watermark", "xtc_special_tokens", "xtc_threshold",
))  # fmt: skip
"""More names that other services know: llama.cpp, vLLM, SGLang, Text Generation Inference, Ollama,
KoboldCpp, text-generation-webui, TabbyAPI, MLX, LiteLLM, and those that sell answers. They are
ignored like any other, but are no slips of ours."""
