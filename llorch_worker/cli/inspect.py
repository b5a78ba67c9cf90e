"""``llorch inspect``: a description of a model file and its memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import printable
from llorch_worker.contract.command_errors import FAILED
from llorch_worker.contract.quantities import counted, human_bytes, human_count
from llorch_worker.demo_model import model_path
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.engine.memory.load_plan import LoadPlan


@settings_options(
    "device",
    "dtype",
    "kv_dtype",
    "max_sequences",
    "max_context",
    "kv_cache_bytes",
    "drafter",
)
def inspect(
    path: Annotated[
        str, typer.Argument(help="A .gguf file, a Hugging Face folder, hf:OWNER/NAME, or demo.")
    ],
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Describe a model file and the memory that a worker needs for it, without loading weights.

    Exits 1 if the model does not fit on the device at present.
    """
    extras.require("worker")
    screen = Screen(as_json=as_json)
    from llorch_worker.cli.inspect_encoder import show_encoder
    from llorch_worker.engine.memory.encoder_plan import EncoderPlan, plan_of
    from llorch_worker.intake.process import IntakeProcess
    from llorch_worker.weights import open_checkpoint

    settings = settings.model_copy(update={"model": model_path(path)})
    checkpoint = open_checkpoint(settings.model)
    plan = plan_of(checkpoint, settings.engine_options)
    with IntakeProcess(checkpoint.path) as intake:
        intake.around()  # raises if a worker could not use the vocabulary
    if isinstance(plan, EncoderPlan):
        show_encoder(screen, settings, plan)
    else:
        _show(screen, settings, plan)
    if plan.misfit:
        raise typer.Exit(FAILED)


def _show(screen: Screen, settings: Settings, plan: LoadPlan) -> None:
    model = _model_document(settings, plan)
    if screen.as_json:
        screen.document(model | {"memory": _memory_document(plan)})
    else:
        _show_model(screen, model)
        _show_memory(screen, plan)


def _model_document(settings: Settings, plan: LoadPlan) -> dict[str, Any]:
    """The facts about the model file."""
    from llorch_worker.weights.contents import file_bytes, stored_numbers, tensor_types

    checkpoint, config = plan.checkpoint, plan.config
    generation_config, ignored = plan.generation_config
    metadata, rope = checkpoint.metadata, config.ropes[0]
    names = metadata.get("architectures") or [metadata.get("general.architecture", "llama")]
    return {
        "path": str(settings.model),
        "name": settings.served_name,
        "layout": checkpoint.layout,
        "file_bytes": file_bytes(checkpoint),
        "architecture": str(names[0]),
        "title": metadata.get("general.name"),
        "parameters": stored_numbers(checkpoint),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "context_tokens": config.max_context,
        "vocab_size": config.vocab_size,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling.describe() if rope.scaling else None,
        "tied_embeddings": config.tie_word_embeddings,
        "tensor_types": [asdict(kind) for kind in tensor_types(checkpoint)],
        "tasks": plan.tasks,
        "generation_config": generation_config,
        "generation_config_ignored": ignored,
    }


def _memory_document(plan: LoadPlan) -> dict[str, Any]:
    """The memory that the model needs, and the memory that is free."""
    cache = plan.cache_bytes
    return {
        "device": str(plan.device),
        "dtype": plan.dtype_name,
        "quantised_types": [asdict(kind) for kind in plan.kept_types],
        "kernels": plan.kernels.ops.name,
        "kernels_reason": plan.kernels.reason,
        "layers_in_one_call": plan.layers_refusal is None,
        "layers_reason": plan.layers_refusal,
        "max_sequences": plan.options.sequences,
        "max_context_tokens": plan.shape.max_context,
        "full_contexts": plan.full_contexts,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes": cache["kv"] + cache.get("kv_scales", 0),
        "rope_bytes": cache["rope"],
        "masks_bytes": cache["masks"],
        "decode_bytes": cache.get("decode", 0),
        "workspace_bytes": plan.workspace_bytes,
        "process_bytes": plan.process_bytes,
        "vocabulary_bytes": plan.vocabulary_bytes,
        "texts_bytes": plan.texts_bytes,
        "cells_bytes": plan.cells_bytes,
        "total_bytes": plan.total_bytes,
        "free_bytes": plan.free_bytes,
        "cache_share": plan.cache_share,
        "fits": plan.misfit is None,
        "misfit": plan.misfit,
    }


def _show_model(screen: Screen, model: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    heads = f"{model['heads']} of {model['head_dim']}"
    if model["kv_heads"] != model["heads"]:
        heads += f", sharing {model['kv_heads']} KV heads"
    scaling = f", scaled by {model['rope_scaling']}" if model["rope_scaling"] else ""
    layout = {"gguf": "GGUF file", "hugging_face": "Hugging Face folder"}[model["layout"]]
    types = (
        f"{kind['name']} {human_bytes(kind['stored_bytes'])}" for kind in model["tensor_types"]
    )
    tied = ", shared by input and output" if model["tied_embeddings"] else ""
    rows = {
        "architecture": model["architecture"] + (f" ({model['title']})" if model["title"] else ""),
        "parameters": human_count(model["parameters"]),
        "layers": f"{model['layers']}, hidden {model['hidden_size']:,}, "
        f"intermediate {model['intermediate_size']:,}",
        "heads": heads,
        "context": f"{model['context_tokens']:,} tokens "
        f"(RoPE theta {model['rope_theta']:,.0f}{scaling})",
        "vocabulary": f"{model['vocab_size']:,} tokens{tied}",
        "tensors": ", ".join(types),
    }
    if sampling := model["generation_config"]:
        rows["sampling"] = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
    if model["generation_config_ignored"]:
        rows["remarks"] = "\n".join(model["generation_config_ignored"])
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(f"  {label}", Text(printable(value)))
    screen.out.print(Text(printable(str(model["path"])), "bold"), soft_wrap=True)
    screen.out.print(Text(f"  {layout}, {human_bytes(model['file_bytes'])}\n"))
    screen.out.print(table)


def _show_memory(screen: Screen, plan: LoadPlan) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    cache = plan.cache_bytes
    kv_bytes = cache["kv"] + cache.get("kv_scales", 0)
    held = f"{plan.full_contexts:g} full context{'' if plan.full_contexts == 1 else 's'}"
    wish = "" if plan.full_contexts >= plan.options.sequences else ", fewer than sequences"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for label, size_bytes, note in (
        ("weights", plan.weights_bytes, f"as {plan.kept_as}"),
        ("KV cache", kv_bytes, held + wish),
        ("RoPE tables", cache["rope"], ""),
        ("causal masks", cache["masks"], ""),
        ("decode", cache.get("decode"), "buffers of recorded steps"),
        ("workspace", plan.workspace_bytes, "of one step, as planned"),
        ("process", plan.process_bytes or None, "Python and its libraries"),
        ("vocabulary", plan.vocabulary_bytes or None, "tokenizer and grammars, as planned"),
        ("recent texts", plan.texts_bytes or None, "to draft from"),
        ("texts to read", plan.cells_bytes or None, "for vectors"),
    ):
        if size_bytes is not None:
            table.add_row(f"  {label}", human_bytes(size_bytes), note)
    table.add_row(
        "  [not dim bold]total[/]",
        f"[bold]{human_bytes(plan.total_bytes)}[/]",
        f"of {human_bytes(plan.free_bytes)} free",
    )
    title = (
        f"Memory on {plan.device}, {counted(plan.options.sequences, 'sequence')} of up to "
        f"{counted(plan.shape.max_context, 'token')}"
    )
    screen.out.print(Text(f"\n{title}", "bold"))
    screen.out.print(table)
    if plan.device.type == "cpu":
        how = plan.layers_refusal
        said = "in one native call" if how is None else f"one operation at a time: {how}"
        screen.out.print(Text(f"  the layers of a step run {said}", "dim"))
    verdict = f"does not fit: {plan.misfit}" if plan.misfit else "fits"
    style = "bold red" if plan.misfit else "green"
    screen.out.print(Padding(Text(printable(verdict), style), (0, 0, 0, 2)))
    if plan.misfit and plan.full_contexts >= 1 and plan.total_bytes <= plan.free_bytes:
        remark = f"a cache may take {plan.cache_share:.0%} of what the weights leave free"
        screen.out.print(Text(f"  {printable(remark)}", "dim"))
