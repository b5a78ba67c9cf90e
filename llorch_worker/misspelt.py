"""Variables of the environment that look like settings and are none."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping

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
        f"{name} is no setting and has no effect" + (f"; did you mean {right}?" if right else "")
        for name, right in misspelt(*read).items()
    ]
