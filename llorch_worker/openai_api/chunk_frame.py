"""What the chunks of a streamed answer have around their choices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from llorch_worker.contract import Started, Tokens, Usage
from llorch_worker.openai_api.fingerprint import system_fingerprint
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.usage import usage_document


class ChunkFrame:
    """The id, the model and the usage of one stream.

    It counts the tokens of all jobs of the stream, and puts the usage where its options want it.
    """

    def __init__(self, id: str, object: str, created: int, options: StreamOptions | None) -> None:
        """``created``: Unix time."""
        self._same: dict[str, Any] = {
            "id": id,
            "object": object,
            "created": created,
            "model": "",
            "system_fingerprint": None,
        }
        options = options or StreamOptions()
        self._in_the_end = options.include_usage
        self._everywhere = options.include_usage and options.continuous_usage_stats
        self._prompts: dict[int, Usage] = {}
        self._completion: dict[int, int] = defaultdict(int)

    def started(self, job: int, event: Started) -> None:
        self._same["model"] = event.model
        self._same["system_fingerprint"] = system_fingerprint(event)
        self._prompts[job] = Usage(
            prompt=event.prompt_tokens, cached=event.cached_tokens, completion=0
        )

    def tokens(self, job: int, event: Tokens) -> None:
        self._completion[job] += len(event.ids)

    def finished(self, job: int, usage: Usage) -> None:
        self._prompts[job] = usage
        self._completion[job] = 0

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with this choice."""
        chunk = {**self._same, "choices": [choice]}
        if self._in_the_end:
            chunk["usage"] = self._usage() if self._everywhere else None
        return chunk

    def end(self) -> Iterator[dict[str, Any]]:
        """The last chunk, of the usage alone, if the options want it."""
        if self._in_the_end:
            yield {**self._same, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        generated = Usage(prompt=0, completion=sum(self._completion.values()))
        return {**usage_document((*self._prompts.values(), generated))}
