"""A conversation: its turns, and how they are sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llorch_worker.cli.request_options import with_sampling
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings

MOST_TOKENS = 4096
"""Of an answer for which nobody names a maximum, if the context has room for them."""


class Conversation:
    """The turns so far, the system message, and the ``fields`` of requests that the user named."""

    def __init__(self, fields: dict[str, Any], system: str | None) -> None:
        self.fields = fields
        self.system = system
        self.turns: list[dict[str, str]] = []

    def request(
        self, config: Mapping[str, int | float], settings: Settings
    ) -> tuple[GenerationRequest, str]:
        """The request for the next answer, and what it takes as sampling, for people.

        Raises:
            InvalidRequest: a field breaks a rule.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns]
        most = {"max_tokens": MOST_TOKENS, "cut_max_tokens": True}
        request = GenerationRequest(messages=messages, **{**most, **self.fields})
        if "max_tokens" not in self.fields:
            # So that the makers' own is taken.
            request.model_fields_set.discard("max_tokens")
        return with_sampling(request, config, settings)

    def sampling(self, config: Mapping[str, int | float], settings: Settings) -> str:
        """How answers are sampled: what the user named, and what is taken besides."""
        asked = Conversation(self.fields, None)
        asked.turns = [{"role": "user", "content": "any"}]
        _, taken = asked.request(config, settings)
        named = ", ".join(f"{name} {value}" for name, value in self.fields.items())
        return "; ".join(part for part in (named and f"set: {named}", taken) if part)

    def set(self, name: str, text: str) -> None:
        """Sets a field of the next requests; an empty ``text`` unsets it.

        Raises:
            InvalidRequest: the value breaks a rule.
        """
        fields = {each: value for each, value in self.fields.items() if each != name}
        if text:
            fields[name] = _value(name, text)
        GenerationRequest(prompt="any", **fields)
        self.fields = fields

    def save(self, path: Path) -> None:
        """Writes the turns as JSON messages into a ``.json``, else as Markdown.

        Raises:
            CommandError: there is such a file.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.turns]
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        else:
            parts = (f"## {each['role']}\n\n{each['content']}\n" for each in messages)
            text = "\n".join(parts)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise usage_error(f"{path} exists: /save writes new files only") from None


def _value(name: str, text: str) -> Any:
    if name == "stop":
        return [text]
    try:
        return json.loads(text)
    except ValueError:
        return text
