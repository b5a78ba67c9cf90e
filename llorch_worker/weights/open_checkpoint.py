"""Opens a model file of either format."""

from __future__ import annotations

import re
from pathlib import Path

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.hub import local_path
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.gguf import GgufCheckpoint
from llorch_worker.weights.hugging_face import HuggingFaceCheckpoint
from llorch_worker.weights.quantised_folder import QuantisedFolder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, a Hugging Face folder or ``hf:...`` and check that it is complete.

    Reads headers only. Raises ModelLoadFailed with one sentence that names path, rule and remedy.
    """
    path = local_path(Path(path))
    wanted = "give a .gguf file or a Hugging Face model folder."
    try:
        if path.is_dir():
            folder = HuggingFaceCheckpoint(path)
            config = folder.metadata.get("quantization_config")
            return folder if config is None else QuantisedFolder(folder, config)
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
    return GgufCheckpoint(path)
