"""The files of a GGUF model that is split into parts."""

from __future__ import annotations

import re
from pathlib import Path

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.side_file import exists

_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def split_parts(path: Path) -> list[Path]:
    """All parts of the split model that ``path`` belongs to, in order; or ``path`` alone.

    The first has the model's metadata. Raises ModelLoadFailed if one is missing.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    count = int(match[3]) if match else 0
    if match is None or count == 0:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not exists(part):
            raise ModelLoadFailed(
                f"{path} is one part of {count}, and {part} is missing; "
                "put all parts in one folder."
            )
    return parts
