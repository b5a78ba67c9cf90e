"""Whether a model is a folder or a file."""

from __future__ import annotations

import re
from pathlib import Path

from llorch_worker.contract import ModelLoadFailed


def is_folder(path: Path) -> bool:
    """Whether the model at ``path`` is a Hugging Face folder; else it is a GGUF file, by its name.

    Raises ModelLoadFailed with one sentence that names path, rule and remedy.
    """
    wanted = "give a .gguf file or a Hugging Face model folder."
    try:
        if path.is_dir():
            return True
        if not path.exists():
            if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and path.suffix != ".gguf":
                wanted = f"for the model of the Hugging Face hub write hf:{path}."
            raise ModelLoadFailed(f"{path} does not exist; {wanted}")
        if not path.is_file():  # opening a pipe would block forever
            raise ModelLoadFailed(f"{path} is not a regular file; {wanted}")
    except OSError as error:
        raise ModelLoadFailed(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions."
        ) from error
    if path.suffix in {".safetensors", ".json"}:
        raise ModelLoadFailed(
            f"{path} is one file of a Hugging Face model; give the folder that holds it."
        )
    if path.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
        raise ModelLoadFailed(
            f"{path} is a pickle, which can run code when it is opened; "
            "convert the model to safetensors or GGUF."
        )
    return False
