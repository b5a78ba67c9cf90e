"""The usage of an answer as its tokens arrive."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from llorch_worker.contract import Started, Tokens, Usage
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.usage import usage_document


class ChunkUsage:
    """Counts the tokens of all jobs of a stream, and puts them where its options want them."""

    def __init__(self, options: StreamOptions | None) -> None:
        options = options or StreamOptions()
        self.in_the_end = options.include_usage
        self._everywhere = options.include_usage and options.continuous_usage_stats
        self._prompts: dict[int, Usage] = {}
        self._completion: dict[int, int] = defaultdict(int)

    def started(self, job: int, event: Started) -> None:
        self._prompts[job] = Usage(
            prompt=event.prompt_tokens, cached=event.cached_tokens, completion=0
        )

    def tokens(self, job: int, event: Tokens) -> None:
        self._completion[job] += len(event.ids)

    def finished(self, job: int, usage: Usage) -> None:
        self._prompts[job] = usage
        self._completion[job] = 0

    def fields(self) -> dict[str, Any]:
        """What a chunk with choices says of the usage."""
        if self._everywhere:
            return {"usage": self.document()}
        return {"usage": None} if self.in_the_end else {}

    def document(self) -> dict[str, Any]:
        generated = Usage(prompt=0, completion=sum(self._completion.values()))
        return {**usage_document((*self._prompts.values(), generated))}
