"""``python -m llorch_worker.kernels.native [VARIANT ...]`` compiles kernels ahead.

Without arguments: all variants of this architecture, for an image that many processors will run. It
prints the libraries.
"""

from __future__ import annotations

import argparse
import platform

from llorch_worker.kernels.native.build import CannotBuild, built
from llorch_worker.kernels.native.variants import VARIANTS, variants_of

parser = argparse.ArgumentParser(prog="python -m llorch_worker.kernels.native")
parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
for wanted in parser.parse_args().variants or variants_of(platform.machine()):
    if wanted not in VARIANTS:
        parser.error(f"unknown variant {wanted!r}; allowed: {', '.join(VARIANTS)}")
    try:
        print(built(wanted))
    except CannotBuild as reason:
        parser.exit(1, f"error: {reason}\n")
