"""Grammars in GBNF, llama.cpp's dialect of EBNF, as Lark."""

from __future__ import annotations

from llorch_worker.contract import Fault, InvalidRequest, describe


def as_lark(field: str, grammar: str) -> str:
    """``grammar`` in Lark, which it may be in already.

    Raises ``InvalidRequest`` for broken GBNF; llguidance says what is wrong with Lark.
    """
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(grammar)
    except GbnfToLarkError as error:
        place = f" (line {grammar.count(chr(10), 0, error.pos.pos) + 1})"
    except Exception:  # noqa: BLE001 - llguidance raises it bare for a rule that is not there
        place = ""
    # The message would quote the grammar.
    rule = f"must be Lark or GBNF; as GBNF it cannot be read{place}"
    raise InvalidRequest.from_faults([Fault(field=field, rule=rule, got=describe(grammar))])
