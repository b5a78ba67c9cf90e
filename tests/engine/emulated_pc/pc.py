"""An emulated PC that runs one program of this machine on a processor that this machine lacks.

Bochs emulates AVX-512, and QEMU does not. It emulates a whole PC, so the program runs under a Linux
that boots from a CD with the files that the program needs.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LINUX = Path(os.environ.get("LLORCH_TEST_LINUX", "/"))
"""Where Debian's linux-image-cloud-amd64 is installed, or unpacked with ``dpkg-deb --extract``."""
KERNELS = "boot/vmlinuz-*-cloud-amd64"

PROGRAMS = {"bochs": "bochs and bochs-term", "xorriso": "xorriso", "busybox": "busybox-static"}
BOOT_LOADER = {
    Path("/usr/lib/ISOLINUX/isolinux.bin"): "isolinux",
    Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"): "syslinux-common",
}
"""What is needed, and the Debian packages that have it."""

DRIVERS = ("scsi_common", "scsi_mod", "libata", "ata_piix", "cdrom", "sr_mod", "isofs")
"""What Linux reads a CD with, each after those that it needs."""

# What Linux must not use of Bochs 2.7. It gives wrong sizes for the registers that XSAVES saves and
# for those of protection keys: Linux would leave out AVX. A copy with REP MOVSB can take forever.
HIDDEN_FROM_LINUX = "xsaves,xsavec,pku,erms,fsrm"
HIDDEN_FROM_LIBC = "glibc.cpu.hwcaps=-ERMS,-FSRM"
BOOT = """\
default emulated
label emulated
kernel linux
initrd initrd
append console=ttyS0 quiet loglevel=4 mitigations=off nosmp clearcpuid={hidden}
"""
INIT = """\
#!/busybox sh
/busybox mkdir /bin /cd
/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs none /dev
for name in {drivers}; do insmod /$name.ko; done
until mount -t iso9660 -o ro /dev/sr0 /cd; do usleep 10000; done
mount -t proc none /cd/proc
mount -t devtmpfs none /cd/dev
mount -t tmpfs none /cd/tmp
env -i {variables} /bin/chroot /cd {command} > /dev/ttyS1 2>&1
echo "exit status $?" > /dev/ttyS1
poweroff -f
"""
"""The first process of the PC's Linux. The CD's drive appears a moment after its driver."""

CD = "cd.iso"
CONFIGURATION = """\
display_library: term
memory: guest=1024, host=1024
ata0-master: type=cdrom, path={cd}, status=inserted
boot: cdrom
cpu: model={model}, ips=50000000
clock: sync=none
com1: enabled=1, mode=file, dev=linux.txt
com2: enabled=1, mode=file, dev=output.txt
log: bochs.txt
panic: action=fatal
"""
LONGEST_RUN_S = 600


class DidNotBoot(Exception):
    """Linux did not reach the program; the message ends with the last that it said."""


def missing_packages() -> list[str]:
    """The Debian packages that are needed and not there."""
    packages = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    packages += [package for path, package in BOOT_LOADER.items() if not path.exists()]
    return packages if list(LINUX.glob(KERNELS)) else [*packages, "linux-image-cloud-amd64"]


def make_cd(
    folder: Path, opened: Sequence[Path], command: list[str], environment: Mapping[str, str]
) -> None:
    """Write the CD: Linux, and a system of the files opened that runs a command when it starts."""
    kernel = max(LINUX.glob(KERNELS))
    release = kernel.name.removeprefix("vmlinuz-")
    modules = LINUX / "lib/modules" / release / "kernel"
    first, boot = folder / "initrd", folder / "boot"
    for made in (first, boot, *(boot / name for name in ("proc", "dev", "tmp"))):
        made.mkdir()
    shutil.copy(shutil.which("busybox") or "", first / "busybox")
    for name in DRIVERS:
        shutil.copy(next(modules.rglob(f"{name}.ko")), first)
    libraries = {str(path.parent) for path in opened if path.name.startswith("lib")}
    variables = {
        **environment,
        "LD_LIBRARY_PATH": ":".join(sorted(libraries)),
        "GLIBC_TUNABLES": HIDDEN_FROM_LIBC,
    }
    init = INIT.format(
        drivers=" ".join(DRIVERS),
        variables=shlex.join(f"{name}={value}" for name, value in variables.items()),
        command=shlex.join(command),
    )
    (first / "init").write_text(init)
    (first / "init").chmod(0o755)
    names = "\n".join(path.name for path in first.iterdir())
    with (boot / "initrd").open("wb") as archive:
        pack = ["busybox", "cpio", "-o", "-H", "newc"]
        subprocess.run(pack, cwd=first, input=names.encode(), stdout=archive, check=True)
    shutil.copy(kernel, boot / "linux")
    for path in BOOT_LOADER:
        shutil.copy(path, boot)
    (boot / "isolinux.cfg").write_text(BOOT.format(hidden=HIDDEN_FROM_LINUX))
    grafts = "\n".join(f"{name}={path}" for name, path in _on_cd(opened).items())
    (folder / "files").write_text(grafts)
    write = ["xorriso", "-as", "mkisofs", "-quiet", "-R", "-o", CD]
    bootable = ["-b", "isolinux.bin", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    subprocess.run(
        [*write, *bootable, "-graft-points", "-path-list", "files", "boot"],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def _on_cd(opened: Iterable[Path]) -> dict[Path, Path]:
    """Each file's name on the CD and the file: those opened, and what only has to be there."""
    files = {path: path.resolve() for path in opened}
    for real in [real for real in files.values() if ".so" in real.name]:
        # The dynamic linker asks for libz.so.1 and opens libz.so.1.2.13.
        files |= {path: real for path in real.parent.glob("*.so*") if path.resolve() == real}
    python = Path(sys.executable)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    unopened = (
        python,
        python.parents[1] / "pyvenv.cfg",
        Path("/lib64/ld-linux-x86-64.so.2"),
        Path(str(torch.origin)).parent / "bin/torch_shm_manager",
    )
    return files | {path: path.resolve() for path in unopened if path.exists()}


def run_pc(folder: Path, model: str) -> list[str]:
    """Boot a processor of Bochs' from the CD; what the command printed, then "exit status N".

    Raises:
        DidNotBoot: Linux did not reach the command.
    """
    (folder / "bochsrc").write_text(CONFIGURATION.format(cd=CD, model=model))
    (folder / "continue").write_text("c\n")
    said, output = folder / "linux.txt", folder / "output.txt"
    for path in (said, output):
        path.unlink(missing_ok=True)
    # Debian's Bochs has a debugger, which waits for "c", and draws the PC's screen in a terminal.
    bochs = "exec bochs -q -f bochsrc -rc continue"
    terminal = ["script", "--quiet", "--command", bochs, "/dev/null"]
    subprocess.run(
        ["timeout", "--kill-after=5", str(LONGEST_RUN_S), *terminal],
        cwd=folder,
        env={**os.environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,  # switching off is an error
    )
    if not output.exists():
        raise DidNotBoot(said.read_text(errors="replace")[-2000:] if said.exists() else "nothing")
    return output.read_text().replace("\r\n", "\n").splitlines()
