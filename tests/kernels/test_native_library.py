"""Which native kernels a machine gets, and what they may contain."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.engine.memory.compute_device import check_kernels
from llorch_worker.engine_options import KernelChoice, Variant
from llorch_worker.kernels import choose_ops
from llorch_worker.kernels.native import library, variants
from llorch_worker.kernels.native.build import built
from llorch_worker.kernels.native.library import (
    NativeKernels,
    NativeUnavailable,
    native_kernels,
)
from llorch_worker.kernels.native.variants import VARIANTS
from tests.kernels.native import VARIANTS as HERE
from tests.kernels.native import native_or_skip

CPU = torch.device("cpu")

HASWELL = {"avx2", "fma", "f16c"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

GRAVITON_2 = {"fp", "asimd", "atomics", "fphp", "asimdhp", "asimddp"}

PROCESSORS: dict[str, tuple[str, set[str], Variant]] = {
    "Haswell, Zen 3": ("x86_64", HASWELL, "avx2"),
    "Alder Lake": ("x86_64", HASWELL | {"avx_vnni"}, "avxvnni"),
    "Skylake": ("x86_64", SKYLAKE, "avx512"),
    "Ice Lake": ("x86_64", SKYLAKE | {"avx512_vnni"}, "avx512vnni"),
    "Zen 4": ("x86_64", SKYLAKE | {"avx512_vnni", "avx512_bf16"}, "avx512bf16"),
    "Sapphire Rapids": (
        "x86_64",
        SKYLAKE | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
        "amx",
    ),
    "Graviton 2": ("aarch64", GRAVITON_2, "neon"),
    "Graviton 3": ("aarch64", GRAVITON_2 | {"i8mm", "bf16"}, "neonbf16"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_the_fastest_variant_that_it_runs(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine, flags, fastest = PROCESSORS[name]
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(variants, "_processor_flags", lambda: flags)
    monkeypatch.setattr(library, "tile_refusal", lambda: None)
    monkeypatch.setattr(library, "_load", lambda variant, file: NativeKernels(variant=variant))
    assert native_kernels().variant == fastest
    for variant in VARIANTS:
        if set(VARIANTS[variant]) <= flags:
            assert native_kernels(variant).variant == variant
        else:
            with pytest.raises(
                NativeUnavailable, match=r"the processor lacks (avx|amx|asimd|i8mm)"
            ):
                native_kernels(variant)


def test_a_build_is_found_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = native_or_skip().variant
    file = built(variant)
    monkeypatch.chdir(file.parent)
    assert native_kernels(variant, Path(file.name)).variant == variant


def test_a_build_without_one_of_the_kernels_is_refused(tmp_path: Path) -> None:
    variant = native_or_skip().variant
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    other = tmp_path / "other.so"
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(other)], check=True)
    with pytest.raises(NativeUnavailable, match=rf"other\.so has no rms_norm for {variant}"):
        native_kernels(variant, other)


def test_every_variant_is_a_setting() -> None:
    assert tuple(VARIANTS) == get_args(Variant)


def test_a_variant_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_processor_flags", lambda: HASWELL)
    with pytest.raises(
        InvalidLoadOption,
        match="kernels avx512vnni cannot run here: the processor lacks avx512f, avx512bw, ",
    ):
        check_kernels("avx512vnni", CPU)
    with pytest.raises(InvalidLoadOption, match="kernels avx2 are for a CPU; for cuda:0 take auto"):
        check_kernels("avx2", torch.device("cuda", 0))


SMALL_SIGNAL_STACK = """
import ctypes, platform
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
stack = ctypes.create_string_buffer(4096)
given = Stack(ctypes.addressof(stack), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(given), None) == 0
from llorch_worker.kernels import native_absence
from llorch_worker.kernels.native.library import native_kernels
print(native_absence("amx"))
print(native_kernels().variant)
"""
"""Linux refuses AMX to a process if a thread's stack for signals could not hold its registers."""


def test_without_permission_for_amx_the_next_variant_runs_and_the_reason_is_clear() -> None:
    native_or_skip("amx")
    done = subprocess.run(
        [sys.executable, "-c", SMALL_SIGNAL_STACK], capture_output=True, text=True, check=True
    )
    reason, variant = done.stdout.splitlines()
    assert reason.startswith("Linux does not let this process use the tile registers of AMX: ")
    assert variant == "avx512bf16"
    assert done.stderr.count(f"slower kernels are used: {reason}") == 1


def test_a_refusal_of_what_the_processor_has_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, flags, _ = PROCESSORS["Sapphire Rapids"]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(variants, "_processor_flags", lambda: flags)
    monkeypatch.setattr(library, "tile_refusal", lambda: "no tiles for this test")
    library._warn.cache_clear()
    monkeypatch.setattr(library, "_load", lambda variant, file: NativeKernels(variant=variant))
    assert choose_ops(CPU, torch.bfloat16, head_dim=64).reason.startswith("avx512bf16, the fastest")
    assert caplog.messages == ["slower kernels are used: no tiles for this test"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernels", "reason"),
    [
        (torch.float32, 64, "auto", "exact reference"),
        (torch.float16, 64, "auto", "need bfloat16, not float16"),
        (torch.bfloat16, 80, "auto", "not of 80"),
        (torch.bfloat16, 64, "torch", "requested"),
    ],
)
def test_torch_is_chosen_with_the_reason(
    dtype: torch.dtype, head_dim: int, kernels: KernelChoice, reason: str
) -> None:
    chosen = choose_ops(CPU, dtype, kernels, head_dim=head_dim)
    assert chosen.ops.name == "torch"
    assert reason in chosen.reason


@pytest.mark.parametrize(
    ("machine", "flags", "lacks"),
    [
        ("x86_64", {"sse4_2", "avx"}, "avx2, fma, f16c"),
        ("aarch64", {"fp", "asimd"}, "asimddp"),  # Raspberry Pi 4
        ("riscv64", set(), "both"),
    ],
)
def test_a_processor_that_no_variant_fits_uses_torch(
    monkeypatch: pytest.MonkeyPatch, machine: str, flags: set[str], lacks: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(variants, "_processor_flags", lambda: flags)
    chosen = choose_ops(CPU, torch.bfloat16, head_dim=64)
    assert chosen.ops.name == "torch"
    assert chosen.reason.endswith(f"with dot products; this machine lacks {lacks}")


def test_kernels_for_aarch64_say_that_nobody_has_measured_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(variants, "_processor_flags", lambda: GRAVITON_2)
    monkeypatch.setattr(library, "_load", lambda variant, file: NativeKernels(variant=variant))
    chosen = choose_ops(CPU, torch.bfloat16, head_dim=64)
    assert chosen.reason.startswith("neon, the fastest that runs here; ")
    assert "measured on no such machine" in chosen.reason


def test_a_damaged_library_is_reported(tmp_path: Path) -> None:
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match=r"cannot be loaded: .*; remove .*kernels\.so"):
        native_kernels(native_or_skip().variant, damaged)


def test_a_damaged_build_is_named_before_slower_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    native_or_skip()
    damaged = tmp_path / "cut.so"
    damaged.write_bytes(b"\x7fELF")
    library._load.cache_clear()
    monkeypatch.setattr(library, "built", lambda _: damaged)
    try:
        with pytest.raises(NativeUnavailable, match="cannot be loaded"):
            native_kernels()
    finally:
        library._load.cache_clear()
    (said,) = [line for line in caplog.messages if f"remove {damaged}" in line]
    assert said.startswith("slower kernels are used: the compiled kernels cannot be loaded: ")


BEYOND: dict[Variant, str] = {
    "avx2": r"%[tz]mm|%k[0-7]|%[xy]mm(1[6-9]|[23]\d)|\bvpdp|\b(ld)?tile",
    "avxvnni": r"%[tz]mm|%k[0-7]|%[xy]mm(1[6-9]|[23]\d)|\b(ld)?tile",
    "avx512": r"\bv(pdp|dpbf16|cvtne)|%tmm|\b(ld)?tile",
    "avx512vnni": r"\bv(dpbf16|cvtne)|%tmm|\b(ld)?tile",
    "avx512bf16": r"%tmm|\b(ld)?tile",
    "neon": r"\b(usdot|[us]mmla|bf)",
}
"""Instructions and registers that a variant's processors may lack."""


@pytest.mark.parametrize("variant", HERE)
def test_no_variant_holds_an_instruction_beyond_its_own(variant: Variant) -> None:
    native_or_skip()
    if shutil.which("objdump") is None:
        pytest.skip("objdump is missing")
    disassemble = ["objdump", "--disassemble", "--no-show-raw-insn", str(built(variant))]
    lines = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"^ +[0-9a-f]+:\t(.*)", lines, re.MULTILINE)
    assert len(instructions) > 1000
    if variant in BEYOND:
        beyond = re.compile(BEYOND[variant])
        assert not [each for each in instructions if beyond.search(each)]
