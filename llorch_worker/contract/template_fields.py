"""What a request may tell the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from llorch_worker.contract.errors import Fault
from llorch_worker.contract.message import Message
from llorch_worker.contract.shown import describe
from llorch_worker.contract.values import small_json

MAX_BYTES = 16_384
MAX_DEPTH = 32
_TAKEN = frozenset(
    {
        *("messages", "conversations", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""What a template gets from elsewhere."""


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(_TAKEN & value.keys()):
        rule = "must not hold {name}, which templates get from elsewhere"
        raise PydanticCustomError("chat_template_kwargs", rule, {"name": taken[0]})
    return small_json(value, "chat_template_kwargs", most_levels=MAX_DEPTH, most_bytes=MAX_BYTES)


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_small)]


def template_faults(
    messages: Sequence[Message] | None,
    kwargs: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> Iterator[Fault]:
    """The rules that these fields break together."""
    given: dict[str, Any] = {
        "chat_template_kwargs": kwargs,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message or None,
    }
    if messages is None:
        for name, value in given.items():
            if value is not None:
                yield Fault(field=name, rule="needs messages", got=describe(value))
    elif continue_final_message:
        last = messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            rule = "needs a text of the assistant as the last message"
            yield Fault(field="continue_final_message", rule=rule, got=f"role {last.role}")
        if add_generation_prompt:
            rule = "must be false with continue_final_message"
            yield Fault(field="add_generation_prompt", rule=rule, got="true")
