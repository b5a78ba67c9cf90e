"""Links a Lua script with the definitions that it uses.

Redis runs the top level of a script at each call, so each function there costs every call about
half a microsecond to define. A script therefore gets only the functions that it uses. One that only
functions marked ``-- rare`` use is defined inside these, when they are called. A script may mark
its own functions, too, if they use none of its definitions that are not marked.

A definition begins with ``local`` at the beginning of a line, and the next one ends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_RARE = re.compile(r"^local function (\w+)\(.*\) -- rare$", re.MULTILINE)
_OWN_RARE = re.compile(r"^local function \w+\(.*\) -- rare\n.*?^end\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^ *--.*\n| *-- .*$", re.MULTILINE)
_CONSTANT = re.compile(r"^local ([A-Z_]+) = ([-\d.*^ ]+|'[^'\n]*')\n", re.MULTILINE)
_JOINED = re.compile(r"'\s*\.\.\s*\('([^'\n]*)'\)\s*\.\.\s*'")
_DEFINITION = re.compile(r"^local (?:function )?(\w+).*?(?=^local |\Z)", re.MULTILINE | re.DOTALL)


def link(library: str, script: str, constants: Mapping[str, str]) -> str:
    """``script`` after what it uses of ``library``. ``constants``, name -> value, and those that
    either text defines by a literal, are replaced by their values, without comments.

    Raises:
        ValueError: two constants have one name.
    """
    library += "".join(function[0] for function in _OWN_RARE.finditer(script))
    script = _OWN_RARE.sub("", script)
    rare = set(_RARE.findall(library))
    library, script = _COMMENT.sub("", library), _COMMENT.sub("", script)
    values = dict(constants)
    for name, value in _CONSTANT.findall(f"{library}\n{script}"):
        if name in values:
            raise ValueError(f"the scripts define {name} twice")
        values[name] = value
    names = re.compile(rf"\b({'|'.join(values)})\b")

    def fill(text: str) -> str:
        text = names.sub(lambda found: f"({values[found[1]]})", _CONSTANT.sub("", text))
        # What is joined of literals alone becomes one.
        return _JOINED.sub(r"\1", text)

    library, script = fill(library), fill(script)
    linked: dict[str, str] = {}
    # The last first: a definition uses only those before it.
    for definition in reversed([*_DEFINITION.finditer(library)]):
        name, text = definition[1], definition[0]
        use = re.compile(rf"(?<![\w.:]){name}\b")
        users = {user for user, body in linked.items() if use.search(body)}
        if use.search(script) or users - rare:
            linked[name] = text
        else:
            for user in users:
                head, _, body = linked[user].partition("\n")
                linked[user] = f"{head}\n{text}{body}"
    return "".join([*reversed(linked.values()), script])
