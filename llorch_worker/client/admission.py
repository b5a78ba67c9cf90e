"""The client's checks before it enqueues: the model, and the length as far as it is known."""

from __future__ import annotations

import time

import redis

from llorch_worker.broker.connections.url import safe_url
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.contract import (
    ContextLengthExceeded,
    Fault,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    ModelNotServed,
    check_task,
)

NO_WORKER = Fault(
    field="worker",
    rule="is not supported: start that worker with a LLORCH_MODEL_NAME of its own and send the "
    "job to that model; jobs of one affinity_key prefer one worker",
    got="the name of a worker",
)

MODELS_FRESH_S = 2.0
"""How long a client uses its list of models before a submit reads it again."""
WORKERS_FRESH_S = 0.1
"""The same for the workers, of whom there may be many: a job without a model's name needs them."""


class Admission:
    """Decides which model a request is for, or refuses the request."""

    def __init__(self, client: redis.Redis, url: str) -> None:
        self._redis = client
        self._url = url
        self._models: dict[str, ModelCard] = {}
        self._workers: list[WorkerCard] = []
        self._models_read_s = self._workers_read_s = float("-inf")

    def admit(self, request: JobRequest, card: ModelCard) -> None:
        """Refuses a request that the model of this ``card`` cannot answer.

        Raises:
            InvalidRequest: the model does other tasks.
            ContextLengthExceeded: prompt and max_tokens cannot fit into the model's context.
        """
        check_task(request, card.name, card.tasks)
        if not isinstance(request, GenerationRequest):
            return  # the worker tokenises the texts
        given = request.prompt_token_ids
        # Only the worker knows the length of a text, but it is at least one token.
        least = 1 if given is None else len(given)
        limit = card.max_context
        new = request.least_tokens
        if least + new > limit:
            # The card is of the worker that wrote it last; another may hold more, or come back.
            limit = max(limit, registry.largest_context(self._redis, card.name))
        if least + new > limit:
            fault = Fault(
                field="prompt" if request.cut_max_tokens else "prompt + max_tokens",
                rule=f"must not exceed the context of {limit} tokens",
                got=f"{'at least ' if given is None else ''}{least} + {new}",
            )
            raise ContextLengthExceeded.of(limit, least, new, at_least=given is None, fault=fault)

    def card(self, name: str | None) -> ModelCard:
        """The card of the model ``name``; if None, of the only one that is served.

        Raises:
            ModelNotServed: no worker has ever served that model here.
            InvalidRequest: no model is named and there are several.
        """
        name = name or self._only_model()
        if self.fresh_card(name) is None:
            self._models = registry.models(self._redis)
            self._models_read_s = time.monotonic()
        card = self._models.get(name)
        if card is None:
            raise ModelNotServed.never(name, self._models)
        return card

    def fresh_card(self, name: str | None) -> ModelCard | None:
        """The card of the model ``name``, if Redis was asked for it a moment ago."""
        fresh = time.monotonic() - self._models_read_s < MODELS_FRESH_S
        return self._models.get(name) if fresh and name is not None else None

    def _only_model(self) -> str:
        fresh = time.monotonic() - self._workers_read_s < WORKERS_FRESH_S
        if fresh and len(names := self._served()) == 1:
            return names.pop()
        self._workers = registry.workers(self._redis)
        self._workers_read_s = time.monotonic()
        names = self._served() or set(registry.models(self._redis))
        if not names:
            raise ModelNotServed(
                f"no worker has served any model at {safe_url(self._url)}; start one with `llorch "
                "worker`, or correct the URL"
            )
        if len(names) > 1:
            rule = f"must be one of {', '.join(sorted(names))}"
            raise InvalidRequest.from_fault("model", rule, "none")
        return names.pop()

    def _served(self) -> set[str]:
        """The models of the live workers."""
        return {model for card in self._workers for model in card.served}
