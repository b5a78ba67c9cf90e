"""Opens a model file of either format."""

from __future__ import annotations

from pathlib import Path

from llorch_worker.model_files.hub import local_path
from llorch_worker.model_files.kind import is_folder
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.gguf import GgufCheckpoint
from llorch_worker.weights.hugging_face import HuggingFaceCheckpoint
from llorch_worker.weights.quantised_folder import QuantisedFolder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, a Hugging Face folder or ``hf:...`` and check that it is complete.

    Reads headers only. Raises ModelLoadFailed with one sentence that names path, rule and remedy.
    """
    path = local_path(Path(path))
    if not is_folder(path):
        return GgufCheckpoint(path)
    folder = HuggingFaceCheckpoint(path)
    config = folder.metadata.get("quantization_config")
    return folder if config is None else QuantisedFolder(folder, config)
