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
    """What to send in place of it. A field that a body lacks is not said."""

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

_PLAIN = {"type": "text"}
_OF_SCORES = {
    "best_of": Known(no_ops=(1,)),
    "echo": Known(no_ops=(False,)),
    "prompt_logprobs": Known(),
    "return_token_ids": Known(no_ops=(False,)),
}
"""What only answers of completions and chats have room for."""
OF_OTHERS_THAN_COMPLETIONS: dict[str, Known] = {
    "functions": Known(no_ops=([],), instead="tools to /v1/chat/completions"),
    "input": Known(instead="prompt"),
    "instructions": Known(no_ops=("",), instead="prompt"),
    "max_completion_tokens": Known(instead="max_tokens"),
    "max_output_tokens": Known(instead="max_tokens"),
    "messages": Known(instead="prompt, or messages to /v1/chat/completions"),
    "stop_sequences": Known(no_ops=([],), instead="stop"),
    "system": Known(no_ops=("", []), instead="prompt"),
    "tools": Known(no_ops=([],), instead="them to /v1/chat/completions"),
    "top_logprobs": Known(no_ops=(0,), instead="logprobs"),
}
OF_OTHERS_THAN_CHATS: dict[str, Known] = {
    "input": Known(instead="messages"),
    "instructions": Known(no_ops=("",), instead="a system message"),
    "max_output_tokens": Known(instead="max_completion_tokens"),
    "output_config": Known(no_ops=({},), instead="response_format or reasoning_effort"),
    "output_format": Known(instead="response_format"),
    "previous_response_id": Known(instead="messages"),
    "prompt": Known(instead="messages"),
    "prompt_token_ids": Known(instead="messages"),
    "stop_sequences": Known(no_ops=([],), instead="stop"),
    "system": Known(no_ops=("", []), instead="a system message"),
    "text": Known(no_ops=({}, {"format": _PLAIN}), instead="response_format"),
}
OF_OTHERS_THAN_RESPONSES: dict[str, Known] = {
    **_OF_SCORES,
    "context_management": Known(no_ops=([],)),
    "format": Known(no_ops=("",), instead="text.format"),
    "logprobs": Known(no_ops=(False,), instead="top_logprobs"),
    "max_completion_tokens": Known(instead="max_output_tokens"),
    "max_tokens": Known(instead="max_output_tokens"),
    "messages": Known(instead="input"),
    "n_predict": Known(no_ops=(-1,), instead="max_output_tokens"),
    "n_probs": Known(no_ops=(0,), instead="top_logprobs"),
    "output_config": Known(no_ops=({},), instead="text.format or reasoning.effort"),
    "output_format": Known(instead="text.format"),
    "prompt_token_ids": Known(instead="input"),
    "reasoning_effort": Known(instead="reasoning.effort"),
    "response_format": Known(no_ops=(_PLAIN,), instead="text.format"),
    "stop_sequences": Known(no_ops=([],), instead="stop"),
    "system": Known(no_ops=("", []), instead="instructions"),
    "think": Known(instead="reasoning.effort"),
    "thinking": Known(instead="reasoning.effort"),
}
OF_OTHERS_THAN_MESSAGES: dict[str, Known] = {
    **_OF_SCORES,
    "format": Known(no_ops=("",), instead="output_config.format"),
    "input": Known(instead="messages"),
    "instructions": Known(no_ops=("",), instead="system"),
    "logprobs": Known(no_ops=(False,)),
    "max_completion_tokens": Known(instead="max_tokens"),
    "max_output_tokens": Known(instead="max_tokens"),
    "mcp_servers": Known(no_ops=([],)),
    "parallel_tool_calls": Known(no_ops=(True,), instead="tool_choice.disable_parallel_tool_use"),
    "previous_response_id": Known(instead="messages"),
    "prompt": Known(instead="messages"),
    "prompt_token_ids": Known(instead="messages"),
    "reasoning": Known(no_ops=({},), instead="output_config.effort"),
    "reasoning_effort": Known(instead="output_config.effort"),
    "response_format": Known(no_ops=(_PLAIN,), instead="output_config.format"),
    "text": Known(no_ops=({}, {"format": _PLAIN}), instead="output_config.format"),
    "think": Known(instead="thinking"),
    "top_logprobs": Known(no_ops=(0,)),
}

UNKNOWN = Known()
"""Any other field. It is ignored unless the settings refuse it."""

ELSEWHERE = frozenset(("deadline", "message", "prompts", "stop_sequence", "token"))
"""Names that others have, and that are like one of ours. They are ignored as any other."""
