"""Lengths of the loads, lowered to a short context unless the user chose them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

Bounds = tuple[int, int]
"""The least and the most tokens."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the loads; each field has the name of its option."""

    prefill: int
    job_prompt_tokens: Bounds
    job_new_tokens: Bounds

    def fitted(self, context_tokens: int, given: Collection[str]) -> Lengths:
        """Lower all lengths not in ``given``, so that a context of ``context_tokens`` holds each
        load plus one token. Lengths in ``given`` may still be too long."""
        room = context_tokens - 1
        prefill = self.prefill if "prefill" in given else max(1, min(self.prefill, room))
        return replace(self._jobs_fitted(room, given), prefill=prefill)

    def changes(self, before: Lengths) -> list[str]:
        """Options whose value differs from ``before``: ``--prefill 511``."""
        return [
            f"--{name.replace('_', '-')} {_text(getattr(self, name))}"
            for name in ("prefill", "job_prompt_tokens", "job_new_tokens")
            if getattr(self, name) != getattr(before, name)
        ]

    def _jobs_fitted(self, room: int, given: Collection[str]) -> Lengths:
        bounds = {
            "job_prompt_tokens": self.job_prompt_tokens,
            "job_new_tokens": self.job_new_tokens,
        }
        if sum(most for _, most in bounds.values()) <= room:
            return self
        room -= sum(most for name, (_, most) in bounds.items() if name in given)
        free = {name: each for name, each in bounds.items() if name not in given}
        wanted = sum(most for _, most in free.values())
        # In proportion, if both may be lowered.
        for name, each in free.items():
            bounds[name] = _at_most(each, each[1] * room // wanted)
        return Lengths(self.prefill, bounds["job_prompt_tokens"], bounds["job_new_tokens"])


def _at_most(bounds: Bounds, tokens: int) -> Bounds:
    most = max(1, tokens)
    return min(bounds[0], most), most


def _text(value: int | Bounds) -> str:
    return str(value) if isinstance(value, int) else ",".join(map(str, value))
