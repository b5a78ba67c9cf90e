"""Files beside the weights: what they may hold."""

from __future__ import annotations

import pytest

from llorch_worker.model_files.bounds import JSON
from llorch_worker.model_files.side_file import parse_object


def test_signs_within_texts_count_as_nothing() -> None:
    text = "[{,:" * JSON.lists
    assert parse_object(f'{{"a": "{text}"}}') == {"a": text}


@pytest.mark.parametrize("lists", ["[" * (JSON.lists + 1), f"[{'[],' * JSON.lists}[]]"])
def test_more_lists_than_a_file_may_hold_are_counted_and_not_made(lists: str) -> None:
    with pytest.raises(ValueError, match=rf"holds \d+ objects and lists, .* most {JSON.lists}$"):
        parse_object(f'{{"a": {lists}')
