"""Models by name: ``hf:OWNER/NAME[:FILE-or-QUANT][@REVISION]`` in the cache of huggingface_hub."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.processes.spawn import memory_file, spawn

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

PREFIX = "hf:"
FOLDER_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|merges\.txt|chat_template.*|additional_chat_templates/.*"
    r"|modules\.json|\d_\w+/config\.json|config_sentence_transformers\.json|sentence_bert_config\.json"
    r"|(?!consolidated)[^/]*\.safetensors(\.index\.json)?"  # Mistral's second copy of the weights
)
"""What a load reads of a model's folder."""
INCOMPLETE: Final = ".incomplete"
"""How the library calls a file that it downloads."""
_LOOK_S: Final = 0.5
_found: dict[tuple[str, bool], Path] = {}


def local_path(
    path: Path, *, download: bool = True, meanwhile: Callable[[], None] = lambda: None
) -> Path:
    """``path`` itself, or the file or folder in the cache that the name ``hf:...`` stands for.

    Downloads what the cache lacks, unless ``download`` is false. A process asks the hub once for
    each name, so that all its parts read one commit. ``meanwhile`` is called twice a second; what
    it raises, and Ctrl-C, end a download at once, and nothing of it stays on the disk.

    Raises:
        ModelLoadFailed: the name is wrong, access is refused, the disk is too small, or the hub
            does not answer and the cache lacks the model.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return path
    if (text, download) not in _found:
        _found[text, download] = _find(text, download, meanwhile)
    return _found[text, download]


def forget_commits() -> None:
    """Asks the hub anew for each name: it may have newer files."""
    _found.clear()


def _find(text: str, download: bool, meanwhile: Callable[[], None]) -> Path:
    """Asks a process of its own: the library's threads cannot be stopped."""
    with open(memory_file("llorch-hub"), "r+", encoding="utf-8") as file:
        json.dump([text, download], file)
        file.flush()
        process = spawn("llorch_worker.model_files.hub_process", [file.fileno()])
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                meanwhile()
        except BaseException:
            begun = [*_downloaded_by(process.pid)]
            process.kill()
            process.wait()
            for each in begun:
                each.unlink(missing_ok=True)
            raise
        file.seek(0)
        answer = json.load(file)
    match answer:
        case {"path": str(found)}:
            return Path(found)
        case {"refusal": str(message)}:
            raise ModelLoadFailed(message)
    raise ModelLoadFailed(f"{text} cannot be looked up: exit code {process.returncode}.")


def _downloaded_by(pid: int) -> Iterator[Path]:
    """The files that a process downloads at the moment."""
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == INCOMPLETE:
                yield file


def cached_models() -> list[CachedRepoInfo]:
    """The models in the cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda r: r.repo_id)


def delete(repo: CachedRepoInfo) -> None:
    """Remove all revisions of ``repo`` from the cache."""
    from huggingface_hub import scan_cache_dir

    hashes = (revision.commit_hash for revision in repo.revisions)
    scan_cache_dir().delete_revisions(*hashes).execute()
