"""``llorch inspect``: what a model file is, and how much memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.options import JsonOption, model_path, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import FAILED
from llorch_worker.contract.quantities import counted, human_bytes, human_count
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.engine.memory.model_report import MemoryReport, ModelReport


@settings_options("device", "dtype", "kv_dtype", "max_sequences", "max_context", "kv_cache_bytes")
def inspect(
    path: Annotated[str, typer.Argument(help="A .gguf file, a Hugging Face folder, or demo.")],
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Describe a model file and the memory that a worker needs for it. Loads no weights.

    Exits 1 if the model does not fit on the device at present.
    """
    extras.require("worker")
    screen = Screen(as_json=as_json)
    from llorch_worker.engine.memory.model_report import report

    found = report(settings.model_copy(update={"model": model_path(path)}))
    if as_json:
        screen.document(found.model_dump(mode="json"))
    else:
        _show_model(screen, found)
        _show_memory(screen, found.memory)
    if not found.memory.fits:
        raise typer.Exit(FAILED)


def _show_model(screen: Screen, found: ModelReport) -> None:
    from rich.table import Table
    from rich.text import Text

    heads = f"{found.heads} of {found.head_dim}"
    if found.kv_heads != found.heads:
        heads += f", sharing {found.kv_heads} KV heads"
    scaling = f", scaled by {found.rope_scaling}" if found.rope_scaling else ""
    layout = {"gguf": "GGUF file", "hugging_face": "Hugging Face folder"}[found.layout]
    types = ", ".join(f"{t.name} {human_bytes(t.stored_bytes)}" for t in found.tensor_types)
    tied = ", shared by input and output" if found.tied_embeddings else ""
    rows = {
        "architecture": found.architecture + (f" ({found.title})" if found.title else ""),
        "parameters": human_count(found.parameters),
        "layers": f"{found.layers}, hidden {found.hidden_size:,}, "
        f"intermediate {found.intermediate_size:,}",
        "heads": heads,
        "context": f"{found.context_tokens:,} tokens (RoPE theta {found.rope_theta:,.0f}{scaling})",
        "vocabulary": f"{found.vocab_size:,} tokens{tied}",
        "tensors": types,
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(f"  {label}", Text(value))
    screen.out.print(Text(str(found.path), "bold"), soft_wrap=True)
    screen.out.print(Text(f"  {layout}, {human_bytes(found.file_bytes)}\n"))
    screen.out.print(table)


def _show_memory(screen: Screen, memory: MemoryReport) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    held = f"{memory.full_contexts:g} full context{'' if memory.full_contexts == 1 else 's'}"
    wish = "" if memory.full_contexts >= memory.max_sequences else ": fewer than sequences"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("  weights", human_bytes(memory.weights_bytes), f"as {memory.kept_as}")
    table.add_row("  KV cache", human_bytes(memory.kv_bytes), held + wish)
    table.add_row("  RoPE tables", human_bytes(memory.rope_bytes), "")
    table.add_row("  causal masks", human_bytes(memory.masks_bytes), "")
    if memory.decode_bytes:
        table.add_row("  decode", human_bytes(memory.decode_bytes), "buffers of recorded steps")
    table.add_row("  workspace", human_bytes(memory.workspace_bytes), "of one step, as planned")
    if memory.process_bytes:
        table.add_row("  process", human_bytes(memory.process_bytes), "Python and its libraries")
    table.add_row(
        "  [not dim bold]total[/]",
        f"[bold]{human_bytes(memory.total_bytes)}[/]",
        f"of {human_bytes(memory.free_bytes)} free",
    )
    title = (
        f"Memory on {memory.device}, {counted(memory.max_sequences, 'sequence')} of up to "
        f"{counted(memory.max_context_tokens, 'token')}"
    )
    screen.out.print(Text(f"\n{title}", "bold"))
    screen.out.print(table)
    verdict = (
        Text("fits", "green")
        if memory.misfit is None
        else Text(f"does not fit: {memory.misfit}", "bold red")
    )
    screen.out.print(Padding(verdict, (0, 0, 0, 2)))
    if not memory.fits and memory.full_contexts >= 1 and memory.total_bytes <= memory.free_bytes:
        remark = f"a cache may take {memory.cache_share:.0%} of what the weights leave free"
        screen.out.print(Text(f"  {remark}", "dim"))
