"""Runs a program and lists the files that it opened, loaded or imported.

python record.py LIST PROGRAM ARGUMENT...
"""

import os
import runpy
import sys
from importlib.util import source_from_cache
from pathlib import Path

opened = set[str]()


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        opened.add(os.path.abspath(arguments[0]))


sys.addaudithook(note)
listing = sys.argv[1]
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
for module in list(sys.modules.values()):
    for name in (getattr(module, "__file__", None), getattr(module, "__cached__", None)):
        if isinstance(name, str):
            opened.add(name)
opened |= {source_from_cache(name) for name in opened if name.endswith(".pyc")}
mapped = Path("/proc/self/maps").read_text().splitlines()
opened |= {line.split(maxsplit=5)[5] for line in mapped if "/" in line}
special = ("/proc/", "/sys/", "/dev/")
files = [name for name in sorted(opened) if os.path.isfile(name) and not name.startswith(special)]
Path(listing).write_text("\n".join(files))
