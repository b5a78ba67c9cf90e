"""Lists of numbers on the command line."""

from __future__ import annotations

from llorch_worker.contract.command_errors import usage_error


def parse_numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """``"1,8,16"`` as numbers, each once; raises CommandError unless all are 1 to ``most``."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= most for number in numbers):
        raise usage_error(
            f"{option} must be numbers from 1 to {most}, such as 16 or 1,8,16 (got {text[:40]!r})"
        )
    return numbers
