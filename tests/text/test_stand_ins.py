"""Texts pass through templates as if nothing kept their control tokens text."""

from __future__ import annotations

import tracemalloc
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.text.chat_templates import ChatTemplates
from llorch_worker.text.stand_ins import NO_STAND_INS, ControlFinder

SPELLINGS = ("<s>", "</s>", "<|im_end|>", "[/INST]", "<|0|>", "<｜end▁of▁sentence｜>", "_<EOT>")
FINDER = ControlFinder(SPELLINGS)
CONTENTS = "messages | map(attribute='content')"
WORK = (
    *("c | tojson", "c | tojson(ensure_ascii=true)", "messages | tojson(indent=1)", "c | string"),
    *("messages | string", "c ~ '|' ~ c", "c + c", "'%s!' % c", "'%s' | format(c)"),
    *("'{}'.format(c)", "'{0!r:>99}'.format(c)", "[c, c] | join('-')", "c[2:] ~ c[:2]", "c[::-1]"),
    *("c | length", "c | count", "c | upper", "c | lower", "c | title", "c | capitalize"),
    *("c.swapcase()", "c | trim", "c.strip()", "c | center(99)", "c | indent(2, true)"),
    *("c | truncate(9, true)", "c | wordwrap(7)", "c | wordcount", "c | list", "c | first"),
    *("c | last", "c | reverse", "c | batch(3) | list", "c | slice(2) | list"),
    *("c | escape", "c | e", "c | forceescape", "c | striptags", "c | urlencode", "c | pprint"),
    *("{'a': c} | xmlattr", "c | urlize", "c | safe", "c | default('x')", "c | d('x', true)"),
    *(
        "c | replace('<', '(')",
        "c.replace('|', ' ')",
        "c.split('|')",
        "c.split()",
        "c.partition(' ')",
    ),
    *("c.find('<')", "c.startswith('<')", "c.rstrip('>')", "c is string", "c is upper", "c in c"),
    *(f"{CONTENTS} | {each}" for each in ("list", "join('+')", "sort | list", "max", "min")),
    *(f"{CONTENTS} | {each}" for each in ("select('string') | list", "map('upper') | list")),
    *(f"{CONTENTS} | {each}" for each in ("unique | list", "reject('none') | list")),
    *("messages | groupby('content')", "messages[0] | dictsort", "messages[0] | items | list"),
    *("messages | selectattr('content', 'eq', c) | list | length", "messages[0] | attr('content')"),
    *("messages | rejectattr('role', 'in', c) | list", "c == messages[1].content", "c < 'm'"),
    *(
        "{c: 1} | dictsort",
        "{c: 1}[c]",
        "{c: c} | tojson(sort_keys=true)",
        "c | map('upper') | join",
    ),
)
"""What a template may do with a text, each filter of Jinja's for texts at least once."""
OTHER_FILTERS = {"abs", "filesizeformat", "float", "int", "random", "round", "sum"}
"""Those for numbers, and one that draws lots."""


def rendered(template: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """What a template makes of messages with stand-ins, seen through, and without any."""
    templates = ChatTemplates({"default": template}, {})
    stand_ins = FINDER.stand_ins(messages, [template])
    text = stand_ins.unescaped(templates.render(FINDER.put(messages, stand_ins)))
    return stand_ins.meant(text), templates.render(messages)


@settings(max_examples=25, deadline=None)
@given(
    contents=st.lists(
        st.lists(
            st.sampled_from([s for s in SPELLINGS if s != "<|0|>"])
            | st.sampled_from(["<", "s>", " ", "\n", "'", '"', "ⰲ", "\\u2c32", "%E2%B0%B2", "é"])
            | st.text(alphabet="abAB <>|{}/", max_size=4),
            min_size=1,
            max_size=5,
        ).map("".join),
        min_size=2,
        max_size=3,
    )
)
def test_a_text_comes_out_of_all_filters_as_it_would_without_stand_ins(contents: list[str]) -> None:
    # Each begins with another letter: sorting does not look into the spellings.
    beginnings = zip("Kbe", contents, strict=False)
    messages = [{"role": "user", "content": a + content} for a, content in beginnings]
    template = "{% set c = messages[0].content %}" + "\n".join(f"{{{{ {w} }}}}¶" for w in WORK)
    with_stand_ins, plain = rendered(template, messages)
    pairs = zip(with_stand_ins.split("¶"), plain.split("¶"), strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


def test_every_filter_is_among_them() -> None:
    tried = {word for each in WORK for word in each.replace("|", " ").replace("(", " ").split()}
    assert set(jinja2.Environment().filters) - OTHER_FILTERS <= tried


def test_macros_loops_and_variables_pass_texts_on() -> None:
    template = (
        "{% macro shown(it) %}<{{ it }}>{% endmacro %}{% set n = namespace(all='') %}"
        "{% for m in messages %}{% set n.all = n.all ~ m.content[:-1] %}{{ shown(m.content) }}"
        "{% for char in m.content %}{{ char }}.{% endfor %}{% endfor %}{{ n.all }}"
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}"
        "{% set block %}{{ messages }}{% endset %}{{ block }}"
    )
    messages = [{"content": "a</s>b"}, {"content": "<|im_end|>"}]
    with_stand_ins, plain = rendered(template, messages)
    assert with_stand_ins == plain


@pytest.mark.parametrize("text", ["</s>", "<</s>/s>", "<s></s><s>", "x<|im_end|>", "[/INST]<|0|>"])
def test_no_spelling_is_left_whole(text: str) -> None:
    stand_ins = FINDER.stand_ins([{text: text}], [])
    ((key, value),) = FINDER.put([{text: text}], stand_ins)[0].items()
    assert key == value
    assert len(key) == len(text)
    assert not any(spelling in key for spelling in SPELLINGS)
    assert stand_ins.meant(key) == text


def test_a_text_without_control_tokens_needs_no_stand_ins() -> None:
    assert FINDER.stand_ins([{"content": "s> <ⰲ> \ufdd0"}], ["<s>"]) is NO_STAND_INS


def test_equal_texts_get_equal_stand_ins_that_nothing_beside_them_has() -> None:
    made = [FINDER.stand_ins(["a</s>", "<|0|>"], ["template ⰰ"]) for _ in range(2)]
    assert made[0] == made[1]
    first, second, third = made[0].meanings
    assert [made[0].meanings[char] for char in (first, second, third)] == ["s", "S", "|"]
    again = FINDER.stand_ins([f"a</s>{first}\\u2c31", "<|0|>", second], [])
    assert {first, second, "\u2c31"}.isdisjoint(again.meanings)


def test_escapes_take_no_memory_of_their_own() -> None:
    text = "</s>" + r"\u0041" * 30_000
    tracemalloc.start()
    try:
        stand_ins = FINDER.stand_ins([text], [])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stand_ins.meanings
    assert peak_bytes < len(text)


def test_a_text_of_all_rare_characters_is_refused() -> None:
    every = "".join(map(chr, (*range(0x2C00, 0x2C60), *range(0xE000, 0x1F000))))
    every += "".join(map(chr, range(0xF0000, 0x110000)))
    with pytest.raises(ValueError, match="no character is left"):
        FINDER.stand_ins(["</s>", every], [])
    some = FINDER.stand_ins(["</s>", every.replace("\ue000", "").replace("\ue001", "")], [])
    assert list(some.meanings) == ["\ue000", "\ue001"]
