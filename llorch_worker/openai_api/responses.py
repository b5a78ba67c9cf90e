"""A response as OpenAI has it: what was asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from llorch_worker.contract import (
    Cancelled,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    LlorchError,
    Usage,
)
from llorch_worker.openai_api.errors import nothing_came
from llorch_worker.openai_api.fingerprint import system_fingerprint
from llorch_worker.openai_api.logprobs import chat_logprobs, sent_logprobs
from llorch_worker.openai_api.responses_items import (
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    Read,
    ReasoningItem,
    ReasoningText,
    item_id,
    sealed,
    with_ids,
)
from llorch_worker.openai_api.responses_request import ENCRYPTED, ResponseRequest

PREFIX = "resp_"

End = GenerationResult | LlorchError
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ResponseError(_Part):
    """OpenAI's fields, then ours."""

    code: Literal["server_error", "invalid_prompt"]
    message: str
    llorch_code: str
    retriable: bool


class IncompleteDetails(_Part):
    reason: Literal["max_output_tokens", "content_filter"] = "max_output_tokens"
    llorch_finish_reason: FinishReason
    """The contract's, which has more reasons."""


class InputTokensDetails(_Part):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(_Part):
    reasoning_tokens: int = 0


class ResponseUsage(_Part):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            input_tokens=usage.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached),
            output_tokens=usage.completion,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning),
            total_tokens=usage.prompt + usage.completion,
        )


class Response(_Part):
    """OpenAI's fields, then ours."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    frequency_penalty: float
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None

    seed: int | None = None
    """The seed that was used; None until the end."""
    llorch_unmet: list[str] | None = None
    """Rules of a schema that no grammar holds and that the answer breaks."""
    system_fingerprint: str | None = None
    """As a chat's; None until the end."""
    llorch_generation_config: dict[str, int | float] | None = None
    """What the request did not name and the model's makers have set; None until the end."""

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "in_progress")


class InputTokens(_Part):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseRecord(_Part):
    """All that is known of a response before its job ends."""

    job_id: str
    response: Response
    """As it begins."""
    conversation: list[Item]
    """Every turn up to and with the request's own, with ids; not the instructions."""
    generation: dict[str, Any]
    """The fields of the job's request, without its messages."""
    owner: str = ""
    """The name of the key that made it."""
    seals_thoughts: bool = False
    """Whether its thought is also given as an ``encrypted_content``."""


def new_record(
    request: ResponseRequest,
    conversation: Sequence[Read],
    generation: GenerationRequest,
    *,
    job_id: str,
    created_at: int,
) -> ResponseRecord:
    """``generation``: what ``request`` means. ``created_at``: Unix time."""
    background = bool(request.background)
    tool_choice = request.tool_choice or "auto"
    response = Response(
        id=f"{PREFIX}{job_id}",
        created_at=created_at,
        status="queued" if background else "in_progress",
        background=background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=generation.model or "",
        frequency_penalty=generation.frequency_penalty,
        parallel_tool_calls=generation.parallel_tool_calls,
        presence_penalty=generation.presence_penalty,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": request.reasoning and request.reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        store=request.stored,
        temperature=generation.temperature,
        text={
            "format": request.format.document(),
            "verbosity": "medium",
        },
        tool_choice=tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
        tools=[tool.model_dump() for tool in request.functions],
        top_logprobs=request.top_logprobs or 0,
        top_p=generation.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
    return ResponseRecord(
        job_id=job_id,
        response=response,
        conversation=with_ids(conversation, job_id),
        seals_thoughts=ENCRYPTED in (request.include or ()),
        generation={k: v for k, v in generation.wire().items() if k != "messages"},
    )


def failure_of(end: End) -> LlorchError | None:
    """Why nothing came of it; None if something did."""
    if isinstance(end, LlorchError):
        return end
    return nothing_came([(end.ended, end.usage)])


def status_of(end: End) -> Status:
    failure = failure_of(end)
    if failure is not None:
        return "cancelled" if isinstance(failure, Cancelled) else "failed"
    assert isinstance(end, GenerationResult)
    return _item_status(end)


def response_of(record: ResponseRecord, end: End | None, *, running: bool = False) -> Response:
    """The response once its job has this ``end``; None: it waits, or is ``running``."""
    if end is None:
        status: Status = "in_progress" if running else record.response.status
        return record.response.model_copy(update={"status": status})
    status = status_of(end)
    failure = failure_of(end)
    if failure is not None:
        error = None if status == "cancelled" else _error(failure)
        return record.response.model_copy(update={"status": status, "error": error})
    assert isinstance(end, GenerationResult)
    config = end.generation_config or {}
    changes: dict[str, Any] = {
        **{name: config[name] for name in ("temperature", "top_p") if name in config},
        "llorch_generation_config": config or None,
        "status": status,
        "model": end.model,
        "output": output_of(record, end),
        "usage": ResponseUsage.of(end.usage),
        "seed": end.seed,
        "llorch_unmet": list(end.choices[0].unmet or ()) or None,
        "system_fingerprint": system_fingerprint(end),
    }
    if status == "completed":
        changes["completed_at"] = _completed_at(record, end)
    else:
        reason = end.choices[0].finish_reason
        changes["incomplete_details"] = IncompleteDetails(
            reason="content_filter" if reason == "content_filter" else "max_output_tokens",
            llorch_finish_reason=reason,
        )
    return record.response.model_copy(update=changes)


def output_of(record: ResponseRecord, end: GenerationResult) -> list[OutputItem]:
    """The thought, if any, then a message, then the calls. Without calls there is a message."""
    choice = end.choices[0]
    status = _item_status(end)
    thoughts: list[OutputItem] = []
    if choice.reasoning_content:
        thoughts = [reasoning(record, "completed", choice.reasoning_content)]
    calls = [
        call_item(record, index, call.id, call.function.name, call.function.arguments, "completed")
        for index, call in enumerate(choice.tool_calls or ())
    ]
    cut_off = status == "incomplete" and "tools" in record.generation
    if not choice.text and (calls or cut_off):
        # Of a call that was cut off nothing is left.
        return [*thoughts, *calls]
    scored = sent_logprobs(choice.logprobs or (), choice.reasoning_content, choice.text)
    text = OutputText(text=choice.text, logprobs=chat_logprobs(scored)["content"])
    return [*thoughts, message(record, "completed" if calls else status, [text]), *calls]


def call_item(
    record: ResponseRecord,
    number: int,
    call_id: str,
    name: str,
    arguments: str,
    status: ItemStatus,
) -> FunctionCallItem:
    """A call of a response; ``number``: among its calls."""
    return FunctionCallItem(
        id=_id(record, "function_call", number),
        type="function_call",
        call_id=call_id,
        name=name,
        arguments=arguments,
        status=status,
    )


def reasoning(record: ResponseRecord, status: ItemStatus, thought: str) -> ReasoningItem:
    """The thought of a response."""
    return ReasoningItem(
        id=_id(record, "reasoning", 0),
        type="reasoning",
        content=[ReasoningText(text=thought)] if thought else [],
        encrypted_content=sealed(thought) if thought and record.seals_thoughts else None,
        status=status,
    )


def message(record: ResponseRecord, status: ItemStatus, content: list[OutputText]) -> MessageItem:
    """The message of a response."""
    return MessageItem(
        id=_id(record, "message", 0), role="assistant", status=status, content=list(content)
    )


def _completed_at(record: ResponseRecord, end: GenerationResult) -> int:
    timings = end.timings
    took_ms = timings.queue_ms + timings.prefill_ms + timings.decode_ms
    return record.response.created_at + round(took_ms / 1e3)


def _id(record: ResponseRecord, kind: str, index: int) -> str:
    return item_id(kind, record.job_id, len(record.conversation) + index)


def _item_status(end: GenerationResult) -> Literal["completed", "incomplete"]:
    whole = end.choices[0].finish_reason in ("stop", "tool_calls")
    return "completed" if whole else "incomplete"


def _error(error: LlorchError) -> ResponseError:
    document = error.document()
    return ResponseError(
        code="invalid_prompt" if isinstance(error, InvalidRequest) else "server_error",
        message=document.message,
        llorch_code=document.code,
        retriable=document.retriable,
    )
