"""Token ids as requests and questions give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from llorch_worker.contract.output_format import NOT_EMPTY, as_tuple

MAX_PROMPT_TOKENS = 1_000_000
MAX_COUNT = 2**31 - 1
"""Largest number of tokens and largest token id: above any model's, and short enough to print."""
MAX_BIASES = 1_024

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TOKEN_ID = re.compile("[0-9]{1,20}")
"""As a key of a JSON object."""


def _integer_keys(value: object) -> object:
    # Keys of JSON objects are strings: "17" is token 17.
    if not isinstance(value, Mapping):
        return value
    return {
        int(key) if isinstance(key, str) and TOKEN_ID.fullmatch(key) else key: bias
        for key, bias in value.items()
    }


PromptTokenIds = Annotated[
    tuple[TokenId, ...],
    Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True),
    NOT_EMPTY,
    BeforeValidator(as_tuple),
]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_integer_keys),
]
