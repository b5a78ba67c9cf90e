"""One choice of one request on its way through the engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from enum import Enum
from typing import Final

from llorch_worker.cache import Prefix
from llorch_worker.contract import FinishReason, GenerationRequest, Priority
from llorch_worker.engine.choice_text import ChoiceText
from llorch_worker.engine.drafter import Drafter
from llorch_worker.engine.prompt_logprobs import PromptLogprobs
from llorch_worker.engine.told import TokenScore
from llorch_worker.intake.constraints.matcher import Matcher

MOST_FORCED: Final = 16
"""How many tokens a grammar adds to its text in one step. With terminals of one character, each
takes the longer the more text is forced: 0.1 ms at 20,000 characters, 1 ms at 100,000."""
HIGH_RANK = 0
PRIORITY_RANKS: dict[Priority, int] = {"high": HIGH_RANK, "normal": 1, "low": 2}


class SequenceState(Enum):
    """The state of a sequence: without blocks, with blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Prompt and generated ids of one choice, and how much of them the KV cache holds.

    ``computed`` tokens have keys and values in ``blocks``; the rest is pending. A preempted
    sequence keeps its ids and loses only ``computed`` and ``blocks``, so it goes on with a prefill
    of prompt + generated ids. So does a resumed job, whose earlier ids are appended first.
    """

    prefix: Prefix
    """Its place in the prefix tree, set by the scheduler. While the sequence runs, the end of its
    published blocks; while it waits, the end of what was last found of its ids."""

    def __init__(
        self,
        prompt_ids: Ids[int],
        request: GenerationRequest,
        *,
        seed: int,
        text: ChoiceText,
        arrival: int = 0,
        choice: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """``arrival`` counts submissions and breaks ties; ``seed`` is the choice's own. ``matcher``
        stands at the beginning of the grammar that the text must fit. Without ``drafter`` each
        token has a step of its own."""
        self.request = request
        most = request.most_tokens
        assert most is not None, "the request has not been fitted to the context"
        self.max_tokens = most
        self.samples = most > 0
        """Whether the choice goes on after its last known token. Each step asks each sequence."""
        self.seed = seed
        self.choice = choice
        self.arrival = arrival
        self.rank = PRIORITY_RANKS[request.priority]
        self._matcher = matcher
        self.constrained = matcher is not None
        """Whether its text must fit a grammar."""
        self._min_tokens = request.min_tokens
        self.drafter = drafter
        self.stop_ids = frozenset(request.stop_token_ids) | (
            frozenset() if request.ignore_eos else eos_ids
        )
        self.prompt_length = len(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.text = text
        self.logprobs: list[TokenScore] | None = None if request.logprobs is None else []
        self.prompt_logprobs: PromptLogprobs | None = None
        """Those that this choice computes: the first does it for all."""
        if request.prompt_logprobs is not None and choice == 0:
            self.prompt_logprobs = PromptLogprobs(prompt_ids, request.prompt_logprobs)
        self.suspect = False
        """Whether its job may end the engine: until its next token it computes in steps of its
        own, so that no other job is suspected with it."""
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.computed = 0
        self.blocks = array("q")
        """Ids of its KV blocks; numpy copies an array of integers at once, which each step does."""
        self.laid_blocks = 0
        """How many of them its row of the device's tables has."""
        self.reserved_blocks = 0
        """Blocks that are kept free for the rest of its prefill."""
        self.waiting_since_s = 0.0
        """By the scheduler's clock."""
        self.admitted_s = 0.0
        """When it last started, by the same clock."""
        self.waited_s = 0.0
        """How long it waited before it started and after each preemption, and prefilled before a
        preemption that left it without a token."""
        self.cached_tokens = 0
        """Tokens of the prompt that were found in the KV cache and never computed for it. Those
        that only other tenants had sent do not count."""
        self.token_s: float | None = None
        """When its last token came, in monotonic seconds; for :class:`.StepCounts`."""
        self.most_computed = 0
        """The most tokens that had keys and values before a preemption."""
        self.accepted_drafts = 0
        """How many of its tokens were drafts that held."""
        self.told_count = 0
        """Generated tokens that an event has told."""
        self.thought_count = 0
        """Generated tokens that belong to the thought."""
        self.forced_count = 0
        """How many of the last tokens the grammar forced, without a step of their own."""
        if self.ended:
            self.close("length")
            self.state = SequenceState.FINISHED

    @property
    def matcher(self) -> Matcher | None:
        """What the next token must fit: the grammar begins after the thought."""
        return None if self._matcher is None or self.text.thinking else self._matcher

    @property
    def order(self) -> tuple[int, int, int]:
        """Rank, then arrival, then choice; the smallest runs first. Unique in an engine."""
        return (self.rank, self.arrival, self.choice)

    @property
    def asks_for_high(self) -> bool:
        """Whether its request is of high priority; an aged sequence only ranks like one."""
        return self.request.priority == "high"

    @property
    def pending(self) -> int:
        """Tokens without keys and values: 1 while decoding, more before and during prefill."""
        return len(self.token_ids) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its pending tokens are the last sampled one and those that the grammar forced
        after it. Such a sequence goes on in every step. A prompt of one token is a prefill."""
        return self.computed > 0 and self.pending <= 1 + self.forced_count

    @property
    def generated_count(self) -> int:
        """Tokens generated so far; also the position of the next one within the choice."""
        return len(self.token_ids) - self.prompt_length

    @property
    def generated_ids(self) -> list[int]:
        """The generated ids, the one that ended the choice included."""
        return self.token_ids[self.prompt_length :]

    @property
    def ended(self) -> bool:
        """Whether nothing is left to compute: no token, and no log probability of the prompt."""
        return not self.samples and (self.prompt_logprobs is None or self.prompt_logprobs.complete)

    @property
    def skippable(self) -> int:
        """The first tokens that need not be computed if their keys and values are found: all but
        the last known one, or those whose logits have scored the prompt so far."""
        prompt = self.prompt_logprobs
        if prompt is None or prompt.complete:
            return len(self.token_ids) - 1
        return prompt.read_tokens

    def skip_to(self, tokens: int, own: int) -> None:
        """Notes that ``blocks`` hold its first ``tokens`` tokens, found in the prefix cache. Its
        tenant has had the first ``own`` of them before."""
        known = max(self.computed, self.most_computed)
        self.cached_tokens += max(0, min(own, self.prompt_length) - known)
        self.computed = tokens

    def lose_blocks(self) -> None:
        """Keeps only the ids: all of them are pending again."""
        self.most_computed = max(self.most_computed, self.computed)
        self.computed = 0
        self.blocks = array("q")
        self.laid_blocks = self.reserved_blocks = 0
        self.forced_count = 0

    def append(self, token_id: int) -> None:
        """Adds a sampled token; sets ``finish_reason`` if it ends the choice.

        A token that ends the choice by its id stays in ``generated_ids`` but gives no text. Raises
        InvalidRequest if the token does not fit the grammar.
        """
        matcher = self.matcher if self.constrained else None
        token_ids, text = self.token_ids, self.text
        count = len(token_ids) - self.prompt_length + 1
        may_stop = count > self._min_tokens
        ended = may_stop and token_id in self.stop_ids
        # Before anything else changes: a token that the grammar refuses is no part of the text.
        if matcher is not None:
            ended = ended or token_id in matcher.eos_ids
            matcher.end(token_id) if ended else matcher.push(token_id)
        token_ids.append(token_id)
        self.suspect = False
        thinking = text.thinking
        if not ended:
            ended = text.push(token_id, may_stop=may_stop)
        if thinking or text.thinking:
            self.thought_count += 1
        if not ended and matcher is not None:
            ended = matcher.complete
        if ended:
            self.close("stop")
        elif count >= self.max_tokens:
            self.close("length")

    def append_forced(self) -> tuple[int, ...]:
        """Adds the tokens that the grammar forces next, without sampling them, and returns them.

        It adds at most ``MOST_FORCED``: all other sequences of the step wait for it.
        It adds none if the request asks for log probabilities, which only a step of its own gives
        each token. Its mask then leaves no choice, so the tokens are the same.
        """
        if self.matcher is None or self.logprobs is not None:
            return ()
        before = len(self.token_ids)
        # What is forced may open a thought, in which nothing is.
        for _ in range(MOST_FORCED):
            if self.finish_reason is not None or not (self.matcher and self.matcher.forced):
                break
            self.append(self.matcher.forced[0])
        self.forced_count = len(self.token_ids) - before
        return tuple(self.token_ids[before:])

    def close(self, reason: FinishReason) -> None:
        """Ends the choice: releases held-back text and sets ``finish_reason``."""
        # Text held back as the start of a long stop string may contain a whole shorter one.
        self.finish_reason = "stop" if self.text.close() else reason
        self.samples = False
