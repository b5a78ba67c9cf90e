"""Names that are misspelt: variables of the environment that look like settings and are none, and
fields of requests."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import takewhile

from pydantic_settings import BaseSettings

PREFIX = "LLORCH_"
_ELSEWHERE = re.compile(
    r"TEST_.*|BENCH_.*|FULL_SIZE"  # tests and benchmarks
    r"|KEY|KEYS_DIR|MODELS_DIR|REDIS_PORT|PROMETHEUS_KEY"  # docker-compose.yml, docs
    r"|.*_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)"  # Kubernetes, for a Service llorch-...
)
"""Names that something else reads or sets, after the prefix. A link to a Service is also a variable
whose value is the ``tcp://`` URL."""


def misspelt(
    *read: type[BaseSettings], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Each variable ``LLORCH_*`` that nothing reads -> the setting of ``read`` that is most like
    it, or "".

    A gateway's settings are left to the gateway unless its class is among ``read``. ``environment``
    is by default that of this process.
    """
    environment = os.environ if environment is None else environment
    prefixes = {kind: str(kind.model_config["env_prefix"]) for kind in read}
    known = [
        f"{prefix}{name}".upper().removeprefix(PREFIX)
        for kind, prefix in prefixes.items()
        for name in kind.model_fields
    ]
    found = {}
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known or _ELSEWHERE.fullmatch(name):
            continue
        left = name.startswith("GATEWAY_") and f"{PREFIX}GATEWAY_" not in prefixes.values()
        if left or environment[variable].startswith("tcp://"):
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        found[variable] = f"{PREFIX}{nearest[0]}" if nearest else ""
    return found


def warnings(*read: type[BaseSettings]) -> list[str]:
    """:func:`misspelt` as sentences."""
    return [
        did_you_mean(right, f"{name} is no setting and has no effect")
        for name, right in misspelt(*read).items()
    ]


SHORTEST = 4
"""Letters of a name with which others are compared: nearly every shorter name is like another."""
LONG = 6
"""Letters of a name that hardly any other word is like. ``stop`` is like step, top and shop."""


def meant(name: str, known: Iterable[str], *, surely: bool = False) -> str:
    """The one of ``known`` that ``name`` is but for a slip: a letter that is lost, added, wrong or
    swapped with the next, or another way to part words (``maxTokens``, ``max-tokens``); or "".

    ``surely``: of names shorter than :data:`LONG`, only with two letters swapped or parted in
    another way, because a word may be harmless.
    """
    given = _letters(name)
    # One slip leaves the first letter or the last as it is.
    found = [
        right
        for right, letters in _spelt(frozenset(known))
        if (letters[0] == given[:1] or letters[-1] == given[-1:])
        and _is_slip(given, letters, surely=surely)
    ]
    # A letter more than the words' parting says less: topP is top_p, not top_k.
    return min(found, key=lambda right: _letters(right) != given, default="")


def did_you_mean(right: str, sentence: str = "unknown field") -> str:
    """``sentence``, with the name that was meant, if any."""
    return f"{sentence}; did you mean {right}?" if right else sentence


@lru_cache(maxsize=64)
def _spelt(known: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Each of ``known`` with its letters, in order."""
    return tuple((right, _letters(right)) for right in sorted(known))


def _letters(name: str) -> str:
    return re.sub("[_. -]", "", name).lower()


def _is_slip(name: str, right: str, *, surely: bool) -> bool:
    if len(right) < SHORTEST or abs(len(name) - len(right)) > 1:
        return False
    same = _alike(name, right)
    name, rest = name[same:][::-1], right[same:][::-1]
    same = _alike(name, rest)
    name, rest = name[same:], rest[same:]
    if len(name) == len(rest) == 2:
        return name == rest[::-1]
    return len(name) <= 1 >= len(rest) and (not name + rest or not surely or len(right) >= LONG)


def _alike(one: str, other: str) -> int:
    """How many first letters they share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
