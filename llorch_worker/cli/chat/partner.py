"""Who answers in a conversation: a model that the fleet serves, or one that is loaded here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from llorch_worker.cli.enqueue import enqueue
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import (
    Event,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    check_task,
)
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.demo_model import DEMO
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.client import Client, Job
    from llorch_worker.engine.interface import EngineInterface
    from llorch_worker.intake.process import IntakeProcess

_HUB = "hf:"
_CHAT: Final = GenerationRequest(prompt="-")
"""What a model must be able to answer."""


class Answer(Protocol):
    """An answer that comes."""

    def events(self) -> Iterator[Event]: ...

    def cancel(self) -> Any: ...

    def result(self) -> GenerationResult: ...


class Partner(Protocol):
    """Who answers. ``config``: how the model's makers sample from it, as far as they say."""

    name: str
    where: str
    config: Mapping[str, int | float]

    def ask(self, request: GenerationRequest) -> Answer:
        """Raises LlorchError if the request is refused."""

    def close(self) -> None: ...


def is_file(model: str) -> bool:
    """Whether ``model`` names a file, a folder or a download, and not a model that is served."""
    return model.startswith(_HUB) or model.endswith(".gguf") or os.sep in model


class Partners:
    """Finds who answers, by name; it keeps one connection to Redis."""

    def __init__(self, settings: Settings, screen: Screen) -> None:
        self._settings = settings
        self._screen = screen
        self._client: Client | None = None

    def find(self, model: str | None) -> Partner:
        """``model``: a file, a folder, ``hf:...`` or a served model's name; None: one that is
        served.

        Raises:
            LlorchError: it cannot be loaded, or nobody serves it.
            CommandError: no Redis answers, or the extra ``worker`` is missing.
        """
        if model is not None and is_file(model):
            return self._load(model)
        try:
            return self._served(model)
        except BrokerUnavailable as error:
            if model == DEMO and not extras.missing_modules("worker"):
                self._screen.note(f"{error}. Now the demo's model is loaded here.")
                return self._load(model)
            what_to_do = "`llorch up` starts one, and `llorch chat FILE` or `demo` needs none"
            raise CommandError("REDIS_UNREACHABLE", f"{error}. {what_to_do}") from None

    def served(self) -> list[str]:
        """The models that a worker serves now; none without a Redis."""
        try:
            return sorted({model for card in self._connected().workers() for model in card.served})
        except BrokerUnavailable:
            return []

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _connected(self) -> Client:
        from llorch_worker.client import Client

        self._client = self._client or Client(self._settings)
        return self._client

    def _served(self, model: str | None) -> Partner:
        from llorch_worker.broker.fleet.registry import count_serving

        client = self._connected()
        if model is None and len(names := self.served()) > 1:
            model = next((each for each in names if self._generates(each)), names[0])
            self._screen.note(f"{', '.join(names)} are served; /model NAME chooses another.")
        card = client.model_card(model)
        check_task(_CHAT, card.name, card.tasks)
        workers = count_serving(client.workers(), card.name)
        if not workers:
            self._screen.note(
                f"no worker serves {card.name} now: answers wait until one starts", "yellow"
            )
        return _Served(client, card.name, workers, card.generation_config)

    def _generates(self, model: str) -> bool:
        return _CHAT.task in self._connected().model_card(model).tasks

    def _load(self, model: str) -> Partner:
        extras.require("worker")
        from llorch_worker.engine.process.engine_process import EngineProcess
        from llorch_worker.intake.process import IntakeProcess
        from llorch_worker.model_files.hub import local_path

        settings = self._settings.model_copy(update={"model": _path_of(model), "model_name": None})
        intake = IntakeProcess(local_path(settings.model))

        def load() -> EngineInterface:
            return EngineProcess.load(
                settings.model,
                settings.engine_options,
                model_name=settings.served_name,
                progress=self._screen.loading_bar(f"loading {settings.served_name}"),
                intake=intake,
                max_sequences=1,
            )

        try:
            return _Loaded(settings.served_name, load, intake)
        except BaseException:
            intake.close()
            raise


def _path_of(model: str) -> Path:
    # ``demo`` is a word for one.
    return Settings(model=model).model


class _Served:
    def __init__(
        self, client: Client, name: str, workers: int, config: Mapping[str, int | float]
    ) -> None:
        self._client = client
        self.name = name
        self.where = f"{workers} worker{'' if workers == 1 else 's'}"
        self.config = config

    def ask(self, request: GenerationRequest) -> Answer:
        named = request.model_copy(update={"model": self.name})
        return _JobAnswer(enqueue(self._client, named, stream=True))

    def close(self) -> None:
        """The connection stays for others."""


class _JobAnswer:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.cancel = job.cancel
        self.result = job.result

    def events(self) -> Iterator[Event]:
        return (entry.event for entry in self._job.stream())


class _Loaded:
    where = "loaded here"

    def __init__(
        self, name: str, load: Callable[[], EngineInterface], intake: IntakeProcess
    ) -> None:
        """``intake``: the one that ``load`` gives to an engine; :meth:`close` closes it."""
        self.name = name
        self._load = load
        self._intake = intake
        self._engine = load()
        try:
            check_task(_CHAT, name, self._engine.facts.tasks)
        except InvalidRequest:
            self._engine.close()
            raise
        self.config: Mapping[str, int | float] = self._engine.facts.generation_config

    def ask(self, request: GenerationRequest) -> Answer:
        if not self._engine.healthy:
            # It has died, which the last answer told; the conversation goes on with a new one.
            self._engine.close()
            self._engine = self._load()
        return self._engine.submit(request)

    def close(self) -> None:
        self._engine.close()
        self._intake.close()
