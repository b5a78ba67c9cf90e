"""``llorch models``: the models of the Hugging Face hub in this machine's cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.command_line import command_line
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import human_bytes

app = command_line(help="List or remove models that hf:OWNER/NAME has downloaded.")


@app.callback(invoke_without_command=True)
def list_models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the models of the hub in the cache: name, size, revision and path."""
    if context.invoked_subcommand is not None:
        return
    extras.require("worker")
    from llorch_worker.model_files.hub import cached_models

    screen = Screen(as_json=as_json)
    models: list[dict[str, Any]] = [
        {
            "name": f"hf:{repo.repo_id}",
            "bytes": revision.size_on_disk,
            "revision": revision.commit_hash,
            "path": str(revision.snapshot_path),
        }
        for repo in cached_models()
        for revision in sorted(repo.revisions, key=lambda each: -each.last_modified)
    ]
    if as_json:
        screen.document(models)
        return
    for model in models:
        size = human_bytes(model["bytes"])
        screen.line(f"{model['name']}  {size}  {model['revision'][:12]}  {model['path']}")
    if not models:
        screen.note("The cache has no models.")


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="hf:OWNER/NAME, with all revisions.")],
    as_json: JsonOption = False,
) -> None:
    """Remove a model from the cache. Workers that run it keep it until they end."""
    extras.require("worker")
    from llorch_worker.model_files.hub import PREFIX, cached_models, delete

    wanted = name.removeprefix(PREFIX)
    repo = next((each for each in cached_models() if each.repo_id == wanted), None)
    if repo is None:
        raise CommandError("NOT_FOUND", f"the cache has no model {wanted}; see llorch models")
    delete(repo)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.document({"removed": f"{PREFIX}{wanted}", "bytes": repo.size_on_disk})
    else:
        screen.line(f"Removed {PREFIX}{wanted}: {human_bytes(repo.size_on_disk)} are free again.")
