"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_worker.settings import Settings, default_model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/tiny.gguf", "tiny"),
        ("llama-2-7b.Q4_K_M.gguf", "llama-2-7b.Q4_K_M"),
        ("my model (1).gguf", "my-model-1-"),
        ("models/tiny/", "tiny"),
        ("a:b@c.gguf", "a-b-c"),
    ],
)
def test_a_model_is_named_after_its_file_as_a_queue_allows(path: str, name: str) -> None:
    assert default_model_name(Path(path)) == name


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    unset = Settings()
    for name in Settings.model_fields:
        monkeypatch.setenv(f"LLORCH_{name.upper()}", "")
    assert Settings() == unset
    assert Settings().model_fields_set == set()
