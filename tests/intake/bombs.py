"""Expressions of chat templates that compute long or grow large, each alone in a template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.sizes import sized

_NUMBERS = (
    *("7 ** (7 ** 9)", "10 ** (10 ** 10)", "(2 ** 30000000) ** 3", "9 ** (9 ** 9) % 1000"),
    *("(messages | length) * 3 ** (10 ** 9)", "(2 + (messages | length)) ** (10 ** 9)"),
)
_SIZES = ("3000000000", "10 ** 10", "2 ** 33")
_TEXTS = ("'a'", "'ab'", "messages[0].content", "'äöü'", "[0]", "(1, 2)", "[[]]", "messages")
_USES = (
    *("{{ X }}", "{{ (X) | length }}", "{% set x = X %}", "{% if X %}{% endif %}"),
    *("{{ (X) | string }}", "{{ 'b' in (X) }}", "{{ [X, X] }}", "{{ {'a': X} }}"),
)
_GROWN = r"""
'%1000000000d' % 1
'%.1000000000f' % 1.5
'%3000000000s' % 'a'
'a' | center(3000000000)
'a'.center(3000000000)
'a'.ljust(3000000000)
'a'.zfill(3000000000)
'a'.rjust(10 ** 10)
'{:>3000000000}'.format('a')
'\t'.expandtabs(3000000000)
('a' * 1000000).replace('a', 'b' * 100000)
('a\n' * 1000000) | indent(100000)
('a ' * 1000000) | wordwrap(1, true, 'b' * 100000)
range(10 ** 10) | list
([1, 0] * (10 ** 7)) | sum
([1, 0] * (10 ** 7)) | join
([1, 0] * (10 ** 7)) | sort
('ab' * (10 ** 7)) | list | sort | reverse | list | unique | list
range(10 ** 10) | batch(10 ** 9) | list
([1, 0] * (10 ** 7)) | map('string') | list
([1, 0] * (10 ** 7)) | select('odd') | list
([1, 0] * (10 ** 7)) | groupby('real') | list
range(10 ** 9) | max
(10 ** 9) in (range(10 ** 10) | map('abs'))
([1] * 100000000) | tojson
('"' * 500000000) | tojson
('<' * 500000000) | escape
('%' * 500000000) | urlencode
(('a ' * 100000000) | wordcount)
('A' * 300000000).lower().upper().title().swapcase().split('a')
('a' * 1000000).split('') if false else (range(10 ** 9) | list)
('a' * 100000).join(range(100000) | map('string'))
'a'.join(['b' * 100000000] * 100)
lipsum(n=1000000)
dict(a=range(10 ** 9) | list)
('a' * 100000) | replace('a', 'b' * 100000)
(10 ** 100000000) | string
(10 ** 10000000) | tojson
((2 ** 100000000) | int) // 3 ** 60000000
('1' * 4000) | int ** (10 ** 9)
(1.5 | round(3)) * [0] * (10 ** 9)
[1] * (10 ** 9) | random
strftime_now('%A' * 100000000)
namespace(a='a' * (10 ** 10)).a
""".strip().splitlines()
_STATEMENTS = (
    "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a=[0]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set n = namespace(a=7) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "{% for i in range(10 ** 9) %}{{ 'a' * 10000 }}{% endfor %}",
    "{% for i in range(10 ** 5) %}{% for k in range(10 ** 5) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% filter indent(10 ** 9) %}a\nb{% endfilter %}",
    "{% set x %}{% for i in range(10 ** 8) %}a{% endfor %}{% endset %}{{ x | upper }}",
    "{% call(x) f() %}{% endcall %}{% macro f() %}{{ caller('a' * 10 ** 10) }}{% endmacro %}",
)
_BROKEN = (
    "{% break %}",
    "{% continue %}",
    "".join(f"{{% for a{i} in messages %}}" for i in range(110)) + "{% endfor %}" * 110,
    "{% if messages == 1 %}" + "{% elif messages == 2 %}" * 3000 + "{% endif %}",
    "{% if a %}" * 500 + "{% endif %}" * 500,
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ " + "not " * 2000 + "1 }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ " + " + ".join(["1"] * 3000) + " }}",
    "{{ a" + ".b" * 3000 + " }}",
    "{{ a" + " | upper" * 3000 + " }}",
    "{% raw %}" * 10,
    "{{ messages" + "[0]" * 3000 + " }}",
)


def computing() -> Iterator[str]:
    """Templates of one expression or statement, each expression in two of the eight uses, in full
    size in all eight: some 300."""
    expressions = [*_NUMBERS, *(f"{text} * {size}" for text, size in product(_TEXTS, _SIZES))]
    for i, expression in enumerate(expressions):
        for k in range(sized(usual=2, full=len(_USES))):
            yield _USES[(2 * i + k) % len(_USES)].replace("X", expression)
    for grown in _GROWN:
        yield f"{{{{ {grown} }}}}"
    yield from _STATEMENTS


def broken() -> Iterator[str]:
    """Templates that nest deeper than Jinja or Python compile, or are none."""
    yield from _BROKEN
