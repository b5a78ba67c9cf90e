"""Finds a model of the hub in a process of its own, and downloads it: see :mod:`.hub`."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.quantities import human_bytes
from llorch_worker.model_files.hub import FOLDER_FILES, INCOMPLETE

_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<choice>[^@:]+))?(?:@(?P<revision>[^@:]+))?"
)
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_BETWEEN_LINES_S = 5.0
_MOST_LISTED = 20
_ABANDONED_S = 600.0
"""A file that nobody has written to for so long is nobody's: the library gives up much earlier."""


@dataclass(frozen=True)
class HubName:
    """The parts of ``hf:OWNER/NAME:CHOICE@REVISION``."""

    repo: str
    choice: str | None
    """A .gguf file, or a quantisation such as ``Q4_K_M``."""
    revision: str

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Raises ModelLoadFailed if ``text`` has another form."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ModelLoadFailed(
                f"{text} is not of the form hf:OWNER/NAME[:FILE-or-QUANT][@REVISION]."
            )
        return cls(match["repo"], match["choice"], match["revision"] or "main")


def main(descriptor: int) -> None:
    """Replaces the question in a file by its answer."""
    with open(descriptor, "r+", encoding="utf-8") as file:
        file.seek(0)
        text, download = json.load(file)
        try:
            answer = {"path": str(find(text, download=download))}
        except ModelLoadFailed as error:
            answer = {"refusal": error.message}
        file.seek(0)
        file.truncate()
        json.dump(answer, file)


def find(text: str, *, download: bool) -> Path:
    """The file or folder in the cache that ``text`` stands for. Downloads what the cache lacks.
    Raises ModelLoadFailed."""
    name = HubName.parse(text)
    from huggingface_hub import snapshot_download

    _require_home()
    with _one_sentence(text):
        sizes = _listed(name) if download else None
        at_hand = sizes is None
        names = _in_cache(name) if sizes is None else tuple(sizes)
        if at_hand and not names:
            raise ModelLoadFailed(
                f"{text} is not in the cache, and the hub is out of reach; check the network, "
                "HF_ENDPOINT and HF_HUB_OFFLINE, or give a file."
            )
        wanted = _choose(text, name.choice, names)
        if sizes is not None:
            _remove_abandoned(name)
            _require_room(text, name, {file: sizes[file] for file in wanted})
        folder = snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=list(wanted),
            local_files_only=at_hand,
            tqdm_class=_progress_class(),
        )
    first = wanted[0]
    return Path(folder, first) if first.endswith(".gguf") else Path(folder)


def _require_home() -> None:
    """The cache is in the home folder, unless HF_HOME or HF_HUB_CACHE names another place."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if HF_HUB_CACHE.startswith("~"):
        raise ModelLoadFailed(
            "There is no home folder to keep models in; set HF_HOME to a folder, or give a file."
        )


def _listed(name: HubName) -> dict[str, int] | None:
    """The repository's files and their bytes; None if the hub is out of reach."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        return None
    except Exception as error:
        if not _out_of_reach(error):
            raise
        return None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _in_cache(name: HubName) -> tuple[str, ...]:
    """The files that the cache has of the revision."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return ()
    return tuple(
        sorted(
            file.file_path.relative_to(revision.snapshot_path).as_posix()
            for repo in repos
            if (repo.repo_type, repo.repo_id) == ("model", name.repo)
            for revision in repo.revisions
            if name.revision in {revision.commit_hash, *revision.refs}
            for file in revision.files
        )
    )


def _choose(text: str, choice: str | None, files: tuple[str, ...]) -> tuple[str, ...]:
    """The files to load, the parts of a split .gguf in order; else those of the folder."""
    ggufs = [file for file in files if file.endswith(".gguf") and "mmproj" not in file]
    models: dict[str, list[str]] = {}
    for file in sorted(ggufs):
        models.setdefault(_PART.sub(".gguf", file), []).append(file)
    if choice is None:
        folder = tuple(sorted(filter(FOLDER_FILES.fullmatch, files)))
        if "config.json" in folder and any(file.endswith(".safetensors") for file in folder):
            return folder
        fitting = list(models)
    else:
        fitting = [model for model, parts in models.items() if choice in (model, *parts)]
        # Q6_K is x-Q6_K.gguf and not x-Q6_K_L.gguf, unless there is no other.
        for border in ("-./", "-._/"):
            quant = re.compile(rf"(.*[-._/])?{re.escape(choice)}([{border}].*)?", re.IGNORECASE)
            fitting = fitting or [m for m in models if quant.fullmatch(m.removesuffix(".gguf"))]
    if len(fitting) == 1:
        return tuple(models[fitting[0]])
    if not models:
        raise ModelLoadFailed(f"{text} has neither a .gguf file nor config.json and *.safetensors.")
    listed = fitting or list(models)
    more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    what = "several .gguf files" if fitting else f"no .gguf file {choice}"
    raise ModelLoadFailed(
        f"{text} has {what}; name one as hf:OWNER/NAME:FILE: "
        f"{', '.join(listed[:_MOST_LISTED])}{more}."
    )


def _remove_abandoned(name: HubName) -> None:
    """Removes what a killed process had begun to download: no other one goes on with it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name.repo, repo_type="model"))
    # Of versions of the library that do go on with them, names have one point.
    for file in folder.glob(f"blobs/*.*{INCOMPLETE}"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                file.unlink()


def _require_room(text: str, name: HubName, sizes: Mapping[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    missing = sum(
        size
        for file, size in sizes.items()
        if not isinstance(try_to_load_from_cache(name.repo, file, revision=name.revision), str)
    )
    cache = Path(constants.HF_HUB_CACHE).absolute()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing > free:
        raise ModelLoadFailed(
            f"{text} needs {human_bytes(missing)} more on the disk of {cache}, which has "
            f"{human_bytes(free)} free; free some, or set HF_HOME to a larger disk."
        )


@contextmanager
def _one_sentence(text: str) -> Iterator[None]:
    """Errors of the library as MODEL_LOAD_FAILED."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        why = "is gated; accept its terms on its page and set HF_TOKEN"
        raise ModelLoadFailed(f"{text} {why}.") from error
    except RepositoryNotFoundError as error:
        why = "does not exist on the hub, or is private; check the name, or set HF_TOKEN"
        raise ModelLoadFailed(f"{text} {why}.") from error
    except RevisionNotFoundError as error:
        raise ModelLoadFailed(
            f"{text} has no such revision; name a branch, tag or commit."
        ) from error
    except HFValidationError as error:
        raise ModelLoadFailed(f"{text} is not a name of the hub: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = "check HF_TOKEN" if status in (401, 403) else "try again later"
        raise ModelLoadFailed(f"{text}: the hub answered {status}; {why}.") from error
    except Exception as error:
        if not _out_of_reach(error):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadFailed(
            f"{text} cannot be downloaded ({why}); try again: the files that are whole stay."
        ) from error


def _out_of_reach(error: Exception) -> bool:
    """Whether no answer came, or the disk failed: errors of the library's HTTP client included."""
    from huggingface_hub.errors import HfHubHTTPError

    # The client is httpx or its successor, depending on the library's version.
    http_error = HfHubHTTPError.__bases__[0]
    return isinstance(error, OSError | http_error)


def _progress_class() -> type[Any] | None:
    """The library's bars on a terminal; elsewhere a line every few seconds."""
    if sys.stderr.isatty():
        return None
    from tqdm import tqdm

    class Lines(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": False, "mininterval": 0, "gui": True})
            self._said_s = 0.0

        def display(self, *_: Any, **__: Any) -> None:
            now_s = time.monotonic()
            if self.unit == "B" and self.n and now_s - self._said_s > _BETWEEN_LINES_S:
                self._said_s = now_s
                of = f" of {human_bytes(self.total)}" if self.total else ""
                print(f"downloaded {human_bytes(int(self.n))}{of}", file=sys.stderr, flush=True)

    return Lines
