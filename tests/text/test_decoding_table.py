from __future__ import annotations

import pytest

from llorch_worker.text.decoding_table import TokenBytes

TOKENS = [b"", b"a", b" two", b"\xe2\x98", b""]


def test_packed_tokens_read_as_a_list_of_them() -> None:
    packed = TokenBytes(TOKENS)
    assert [*packed] == TOKENS
    assert [packed[i] for i in range(len(packed))] == TOKENS
    for part in (slice(None), slice(2), slice(1, 4), slice(9)):
        assert packed[part] == TOKENS[part]
    with pytest.raises(IndexError):
        packed[len(TOKENS)]
