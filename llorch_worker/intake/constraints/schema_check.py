"""Checks texts by JSON Schemas, in a process of its own: ``python schema_check.py``.

A schema of a kilobyte can take hours, because its references branch, and the validator holds the
interpreter's lock all the time. A process can be ended.

Reads a JSON list of [schema, text] and writes for each a line with the list of the rules that it
breaks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jsonschema_rs

MOST = 16
"""Of the broken rules."""
LIMIT_S = 5.0


def broken(pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[list[str]]:
    """For each schema and text the place and the keyword of each rule that is broken, or why it was
    not checked. All together take at most :data:`LIMIT_S`."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps(pairs).encode(),
            capture_output=True,
            check=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        written, why = error.stdout or b"", "it takes too long"
    except subprocess.CalledProcessError as error:
        written, why = error.stdout, "the check failed"
    except OSError as error:
        written, why = b"", f"no process can start: {os.strerror(error.errno or errno.EAGAIN)}"
    else:
        written, why = done.stdout, ""
    # The last line may have been cut off.
    found: list[list[str]] = [json.loads(line) for line in written.split(b"\n")[:-1]]
    return found + [[f": not checked, because {why}"]] * (len(pairs) - len(found))


def validator(schema: Mapping[str, Any]) -> Any:
    """Raises ``ValueError`` for what is no schema, or has patterns or references that cannot be
    checked here."""
    try:
        # Its patterns take linear time, as those of grammars do.
        return _validator(schema, jsonschema_rs.RegexOptions())
    except ValueError:
        # Look-around may take exponential time, of which :data:`LIMIT_S` is granted.
        return _validator(schema, jsonschema_rs.FancyRegexOptions())


def _validator(schema: Mapping[str, Any], patterns: Any) -> Any:
    # It fetches nothing.
    try:
        return jsonschema_rs.validator_for(
            dict(schema), validate_formats=True, pattern_options=patterns, retriever=_nothing
        )
    except jsonschema_rs.ValidationError as error:
        # Its message may quote the schema.
        raise ValueError(str(error.schema_path[-1:] or "")) from None


def _nothing(uri: str) -> Any:  # noqa: ARG001 the signature of a retriever
    raise ValueError("schemas are not fetched")


def _broken(schema: Mapping[str, Any], text: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    for error in islice(validator(schema).iter_errors(value), MOST):
        place = "".join(f"/{part}" for part in error.instance_path)
        yield f"{place}: {error.schema_path[-1] if error.schema_path else 'false'}"


if __name__ == "__main__":
    # Whoever started it may have been killed.
    signal.alarm(math.ceil(LIMIT_S) + 1)
    for pair in json.load(sys.stdin):
        print(json.dumps(list(_broken(*pair))), flush=True)
