"""A request at a server: its choices as they come, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Unpack, cast

from llorch_worker.contract import (
    Choice,
    GenerationRequest,
    Journal,
    JournalledChoice,
    Usage,
)
from llorch_worker.contract.result import FinishReason
from llorch_worker.contract.seeds import job_seed
from llorch_worker.contract.tools import FunctionCall, ToolCall
from llorch_worker.engine.computed_generation import ComputedGeneration
from llorch_worker.engine.interface import Attempt, ModelFacts
from llorch_worker.engine.told import CallTold, TokenScore, TokensTold
from llorch_worker.servers.pieces import Piece

FEW_TOKENS: Final = 4
"""An answer with fewer may end at any time, such as a class or a yes."""
_ENDED: Final = ("stop", "tool_calls")


class ChoiceSoFar:
    """One choice. Ids without a text wait for the text that they are part of, so that a journal
    never has ids of which a reader lacks the text."""

    def __init__(self, index: int, begun: JournalledChoice | None, job_id: str) -> None:
        """``begun``: what a journal has of it."""
        self.index = index
        self._job_id = job_id
        self.begun = begun or JournalledChoice()
        self._texts = [self.begun.text]
        self._thoughts: list[str] = []
        self._calls: dict[int, list[CallTold]] = {}
        """The parts of each, by its index."""
        self._last_calls: dict[int, tuple[int, str | None]] = {}
        """By a server's index, which several may have: the last call's own, and the id that the
        server began it with."""
        self._ids = list(self.begun.token_ids)
        self._waiting: list[int] = []
        self._scores: list[TokenScore] = []
        self._untold: list[TokenScore] = []
        self._has_all_ids = True
        self.made = 0
        """How many tokens have come, at least."""
        self._first_s = 0.0
        self.finish: str | None = None
        self.stop_string: str | None = None
        self.counted: Usage | None = None

    @property
    def tokens(self) -> int:
        """How many there are, or at least are, here and in the journal."""
        return max(len(self._ids) + len(self._waiting), len(self.begun.token_ids) + self.made)

    def take(self, piece: Piece) -> TokensTold | None:
        """What readers get of ``piece``."""
        said = bool(piece.text or piece.thought or piece.calls)
        self.made += piece.tokens
        self._take_ids(piece, has_ids=piece.ids is not None or not said)
        self._untold += piece.scores
        self.finish = piece.finish or self.finish
        self.stop_string = piece.stop_string or self.stop_string
        self.counted = piece.counted or self.counted
        if not said:
            return None
        self._texts.append(piece.text)
        self._thoughts.append(piece.thought)
        piece.calls = tuple(map(self._take_call, piece.calls))
        return self._tell(piece)

    def ends_s(self, request: GenerationRequest, now_s: float) -> float:
        """When it may end at the earliest, as far as is known; monotonic, as ``now_s``."""
        self._first_s = self._first_s or now_s
        if self.made < FEW_TOKENS:
            return now_s
        if request.most_tokens is None:
            return float("inf")
        gap_s = (now_s - self._first_s) / (self.made - 1)
        return now_s + (request.most_tokens - self.tokens) * gap_s

    def rest(self) -> TokensTold | None:
        """The ids that had no text, at the end."""
        return self._tell(Piece()) if self._waiting and self._has_all_ids else None

    def add(self, text: str) -> TokensTold:
        """A text that the server leaves out."""
        self._texts.append(text)
        return self._tell(Piece(text=text))

    def _take_call(self, part: CallTold) -> CallTold:
        """``part``, with an id and a name if it is a call's first, and else without: servers leave
        them out, or tell them again."""
        last = self._last_calls.get(part.index)
        # Some servers give each part an id of its own, but only a call's first has a name.
        is_named = part.id and part.name
        if last is not None and not (is_named and last[1] not in (None, part.id)):
            told = CallTold(last[0], None, None, part.arguments)
            self._calls[told.index].append(told)
            return told
        index = max(self._calls) + 1 if part.index in self._calls else part.index
        self._last_calls[part.index] = index, part.id or None
        id = part.id or f"call_{self._job_id[:24]}_{len(self._calls)}"
        told = CallTold(index, id, part.name or "unnamed", part.arguments)
        self._calls[index] = [told]
        return told

    def _take_ids(self, piece: Piece, *, has_ids: bool) -> None:
        self._waiting += piece.ids or ()
        if piece.generated is not None:
            # A token that is only a part of a character comes in no event of its own.
            known = len(self._ids) + len(self._waiting) - len(self.begun.token_ids)
            has_ids &= known == piece.generated
        self._has_all_ids &= has_ids

    def _tell(self, piece: Piece) -> TokensTold:
        index, ids = len(self._ids), self._waiting if self._has_all_ids else []
        self._ids += ids
        self._waiting = []
        scores, self._untold = self._untold, []
        self._scores += scores
        return TokensTold(
            handle=0,
            choice=self.index,
            index=index,
            ids=ids,
            text=piece.text,
            thought=piece.thought or None,
            scores=scores if scores and len(scores) == len(ids) else None,
            calls=list(piece.calls) or None,
        )

    def result(self, finish: FinishReason | None) -> Choice:
        calls = tuple(
            ToolCall(
                id=str(parts[0].id),
                function=FunctionCall(
                    name=str(parts[0].name), arguments="".join(each.arguments for each in parts)
                ),
            )
            for _, parts in sorted(self._calls.items())
        )
        ended = finish or ("tool_calls" if calls and self.finish in _ENDED else self.finish)
        return Choice(
            index=self.index,
            text="".join(self._texts),
            reasoning_content="".join(self._thoughts) or None,
            token_ids=tuple(self._ids) if self._has_all_ids else (),
            finish_reason=cast(FinishReason, ended or "stop"),
            stop_string=self.stop_string,
            logprobs=tuple(each.entry() for each in self._scores) or None,
            tool_calls=calls or None,
        )


class ServerGeneration(ComputedGeneration):
    """Its engine's event loop calls what :class:`.GenerationHandle` has not."""

    def __init__(
        self,
        request: GenerationRequest,
        facts: ModelFacts,
        *,
        request_cancel: Callable[[ServerGeneration], None],
        **attempt: Unpack[Attempt],
    ) -> None:
        super().__init__(request, facts, **attempt)
        journal = attempt.get("journal") or Journal()
        self.begins_again = journal.begins_again
        self.cancelled = False
        self.seed = job_seed(self.id) if request.seed is None else request.seed
        self.choices = [
            ChoiceSoFar(index, journal.choices.get(index), self.id) for index in range(request.n)
        ]
        self._prompt_tokens: int | None = None
        self.began = False
        """Whether readers have something of this attempt."""
        self.is_read = True
        self.ended_before = journal.terminal is not None
        """Whether readers have seen the end, and only the result is missing."""
        for choice in self.choices if self.ended_before else ():
            choice.finish = getattr(journal.terminal, "finish_reason", "stop")
        self._cancel = request_cancel

    def _request_cancel(self) -> None:
        self._cancel(self)

    def send(self) -> None:
        """The server gets it now."""
        self._started_s = time.monotonic()

    def start(self, prompt_tokens: int) -> None:
        """The server has begun to answer. ``prompt_tokens``: with those of the journal; 0 if they
        are not counted yet. A second call does nothing."""
        if self._prompt_tokens is None:
            self._prompt_tokens = max(0, prompt_tokens - len(self.choices[0].begun.token_ids))
            self._emit_started(self._prompt_tokens)

    def tell(self, event: TokensTold | None) -> None:
        if event is not None:
            self._first_token_s = self._first_token_s or time.monotonic()
            self.began = True
            self._tell_tokens(event)

    def finish(self, finish: FinishReason | None = None) -> None:
        """Ends with a result. ``finish``: why the choices end that the server has not ended."""
        for choice in self.choices:
            if choice.finish is not None:
                self.tell(choice.rest())
        choices = tuple(
            choice.result(finish if choice.finish is None else None) for choice in self.choices
        )
        self._finish_with(choices, self.seed, time.monotonic())

    def _usage(self) -> Usage:
        counted = [choice.counted for choice in self.choices]
        known = [each for each in counted if each is not None]
        again = len(self.choices[0].begun.token_ids)  # the server counts them with the prompt
        prompt = max((each.prompt - again for each in known), default=self._prompt_tokens or 0)
        return Usage(
            prompt=prompt,
            cached=max((each.cached for each in known), default=0),
            completion=sum(
                choice.tokens if each is None else each.completion + again
                for choice, each in zip(self.choices, counted, strict=True)
            ),
            reasoning=sum(each.reasoning for each in known),
            estimated=True if len(known) < len(counted) else None,
        )
