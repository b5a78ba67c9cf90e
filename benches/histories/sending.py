"""``python -m benches.histories.sending CLIENT``, in an environment with the client's packages:
sends each history of standard input, a line of JSON, and writes a line about each request.

``OPENAI_BASE_URL`` and ``MODEL`` say where to.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from benches.histories.turns import JsonObject

AGAIN: JsonObject = {"role": "user", "texts": ["Again."], "parts": False, "name": None}
WEATHER = "sunny"
"""What each call of an answer gives."""


class Way:
    """One way of a client to send a chat."""

    def made(self, turns: list[JsonObject]) -> list[Any]:
        """The client's own messages."""
        return [self.message(turn) for turn in turns]

    def message(self, turn: JsonObject) -> Any:
        raise NotImplementedError

    def asked(self, messages: list[Any], tools: list[JsonObject], choice: str | None) -> list[Any]:
        """Sends them; the answer and the results of its calls, as the client would go on."""
        raise NotImplementedError


def sent(way: Way, history: JsonObject) -> str | None:
    """Sends a history, then its answer and one more question; what failed, if anything did."""
    tools, choice = history["tools"], history["choice"]
    try:
        messages = way.made(history["turns"])
        messages = messages + way.asked(messages, tools, choice) + way.made([AGAIN])
        way.asked(messages, tools, choice)
    except Exception as error:  # noqa: BLE001 - of whatever kind the client has
        return described(error)
    return None


def described(error: BaseException) -> str:
    """The HTTP status and message of an error, or of the one that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(seen, "status_code", None)
        if status is not None:
            return f"{status} {seen}"
        seen = seen.__cause__ or seen.__context__
    return f"{type(error).__name__}: {error}"


def main() -> None:
    client = importlib.import_module(f"benches.histories.clients.{sys.argv[1]}")
    ways: Mapping[str, Way] = client.all_ways()
    for line in sys.stdin:
        history = json.loads(line)
        for name, way in ways.items():
            report = {"way": name, "seed": history["seed"], "error": sent(way, history)}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
