"""The events of a response's stream, from the events of its job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from llorch_worker.contract import Tokens
from llorch_worker.openai_api.logprobs import ChatToken, SentTokens, chat_logprobs
from llorch_worker.openai_api.responses import (
    End,
    ResponseRecord,
    call_item,
    message,
    reasoning,
    response_of,
)
from llorch_worker.openai_api.responses_items import (
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Event = dict[str, Any]


class ResponseEvents:
    """Numbers and orders the events as OpenAI does.

    The same events of the job give the same events and numbers, whoever reads them and when.
    """

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record
        self._next_number = 0
        self._running = False
        self._opened = False
        self._ended = False
        """Whether the message was, because a call followed it."""
        self._calls: list[FunctionCallItem] = []
        """Those begun, with the arguments so far."""
        self._thought: str | None = None
        """What of a thought was sent; None if there is none."""
        self._thought_ended = False
        self._streamed = ""
        self._tokens = SentTokens()
        self._logprobs_sent = 0

    @property
    def last_before_text(self) -> int:
        """The number of the event ``response.in_progress``."""
        return 2 if self._record.response.background else 1

    def begin(self) -> Iterator[Event]:
        """The events before the first of the job."""
        response = self._record.response
        yield self._event("response.created", response=response)
        if response.background:
            yield self._event("response.queued", response=response)
        else:
            yield from self.start()

    def start(self) -> Iterator[Event]:
        """A worker took the job, perhaps again."""
        if not self._running:
            self._running = True
            response = response_of(self._record, None, running=True)
            yield self._event("response.in_progress", response=response)

    def tokens(self, event: Tokens) -> Iterator[Event]:
        self._tokens.add(event.logprobs or ())
        if event.reasoning_content:
            self._tokens.skip(event.reasoning_content)
            yield from self._think(event.reasoning_content)
        if event.text:
            scored = self._tokens.take(event.text)
            yield from self._delta(event.text, chat_logprobs(scored)["content"])
        for part in event.tool_calls or ():
            if part.id is not None:
                yield from self._begin_call(part.id, part.name or "")
            yield from self._argue(part.arguments)

    def end(self, end: End) -> Iterator[Event]:
        """The events after the last tokens. What the job's events did not have, the end has."""
        response = response_of(self._record, end)
        for index, item in enumerate(response.output):
            if isinstance(item, ReasoningItem):
                yield from self._end_thought(item)
            elif isinstance(item, MessageItem):
                yield from self._end_message(item)
            else:
                calls = [each for each in response.output if isinstance(each, FunctionCallItem)]
                yield from self._call(item, index - len(response.output) + len(calls))
        yield from self._end_cut_call()
        status = response.status if response.status in ("completed", "failed") else "incomplete"
        yield self._event(f"response.{status}", response=response)

    def nothing(self) -> Event:
        """The end of a response that nothing is generated for."""
        response = self._record.response.model_copy(update={"status": "completed"})
        return self._event("response.completed", response=response)

    def error(self, code: str, text: str, after: int = -1) -> Event:
        """What ends a stream whose response goes on without it, also for a reader who has had all
        to the number ``after``."""
        self._next_number = max(self._next_number, after + 1)
        return self._event("error", code=code, message=text, param=None)

    def _think(self, thought: str) -> Iterator[Event]:
        if self._thought is None:
            self._thought = ""
            item = reasoning(self._record, "in_progress", "")
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = ReasoningText(text="")
            yield self._in_thought("response.content_part.added", part=part)
        if thought:
            self._thought += thought
            yield self._in_thought("response.reasoning_text.delta", delta=thought)

    def _end_thought(self, item: ReasoningItem) -> Iterator[Event]:
        if self._thought_ended:
            return
        self._thought_ended = True
        (part,) = item.content or [ReasoningText(text="")]
        yield from self._think(part.text[len(self._thought or "") :])
        yield self._in_thought("response.reasoning_text.done", text=part.text)
        yield self._in_thought("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _in_thought(self, kind: str, **fields: Any) -> Event:
        item_id = reasoning(self._record, "in_progress", "").id
        return self._event(kind, item_id=item_id, output_index=0, content_index=0, **fields)

    @property
    def _message_index(self) -> int:
        return 0 if self._thought is None else 1

    def _delta(self, text: str, logprobs: list[ChatToken]) -> Iterator[Event]:
        if not self._opened:
            self._opened = True
            if self._thought is not None:
                # Text follows it, so it is whole.
                yield from self._end_thought(reasoning(self._record, "completed", self._thought))
            yield self._event(
                "response.output_item.added",
                output_index=self._message_index,
                item=message(self._record, "in_progress", []),
            )
            yield self._content("response.content_part.added", part=OutputText(text=""))
        if text:
            self._streamed += text
            self._logprobs_sent += len(logprobs)
            yield self._content("response.output_text.delta", delta=text, logprobs=logprobs)

    def _end_message(self, item: MessageItem) -> Iterator[Event]:
        if self._ended:
            return
        self._ended = True
        (part,) = item.content
        assert isinstance(part, OutputText)
        unsent = part.text[len(self._streamed) :]
        yield from self._delta(unsent, part.logprobs[self._logprobs_sent :])
        yield self._content("response.output_text.done", text=part.text, logprobs=part.logprobs)
        yield self._content("response.content_part.done", part=part)
        index = self._message_index
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _begin_call(self, call_id: str, name: str) -> Iterator[Event]:
        """Ends what comes before it."""
        if self._calls:
            yield from self._end_call(self._calls[-1])
        elif self._opened:
            text = OutputText(text=self._streamed, logprobs=[])
            yield from self._end_message(message(self._record, "completed", [text]))
        elif self._thought is not None:
            yield from self._end_thought(reasoning(self._record, "completed", self._thought))
        item = call_item(self._record, len(self._calls), call_id, name, "", "in_progress")
        self._calls.append(item)
        index = self._call_index(len(self._calls) - 1)
        yield self._event("response.output_item.added", output_index=index, item=item)

    def _argue(self, arguments: str) -> Iterator[Event]:
        if not arguments:
            return
        item = self._calls[-1]
        arguments_so_far = item.arguments + arguments
        self._calls[-1] = item.model_copy(update={"arguments": arguments_so_far})
        place = {"item_id": item.id, "output_index": self._call_index(len(self._calls) - 1)}
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)

    def _call(self, item: FunctionCallItem, number: int) -> Iterator[Event]:
        """The rest of the call with this number."""
        if number == len(self._calls):
            yield from self._begin_call(item.call_id, item.name)
        if number == len(self._calls) - 1:
            yield from self._argue(item.arguments[len(self._calls[-1].arguments) :])
            yield from self._end_call(item)

    def _end_call(self, item: FunctionCallItem) -> Iterator[Event]:
        number = len(self._calls) - 1
        if self._calls[number].status == "completed":
            return
        item = item.model_copy(update={"status": "completed"})
        self._calls[number] = item
        index = self._call_index(number)
        done = {"item_id": item.id, "output_index": index, "arguments": item.arguments}
        yield self._event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _end_cut_call(self) -> Iterator[Event]:
        """A call that is in no output, because it is not whole."""
        if self._calls and self._calls[-1].status == "in_progress":
            item = self._calls[-1].model_copy(update={"status": "incomplete"})
            index = self._call_index(len(self._calls) - 1)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _call_index(self, number: int) -> int:
        return (self._thought is not None) + self._opened + number

    def _content(self, kind: str, **fields: Any) -> Event:
        item_id = message(self._record, "in_progress", []).id
        place = {"item_id": item_id, "output_index": self._message_index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._next_number = self._next_number, self._next_number + 1
        plain = {name: _plain(value) for name, value in fields.items()}
        return {"type": kind, "sequence_number": number, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    return [_plain(each) for each in value] if isinstance(value, list) else value
