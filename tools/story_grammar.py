"""Composes the demo model's training stories: short children's tales from a seeded grammar.

Every story has one main character, one helper, one place and one plot. Which plot is told, and in
which words, depends on the character and the opening, so that what comes first in a story tells
something about what comes next.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from story_plots import ENDINGS, ONE_DAY, PLOTS, SCENES, SOON, STARTS, TRAITS, Beat
from story_world import (
    ALLIES,
    ALLY_NAMES,
    KINDS,
    PAYLOADS,
    PLACES,
    SEASONS,
    TIMES,
    WEATHERS,
    Kind,
    Place,
    split,
)

PRONOUNS = {"m": ("he", "him", "his", "himself"), "f": ("she", "her", "her", "herself")}
OWN_PLOT = 0.75  # share of stories with a plot that suits the character
OWN_VOICE = 0.6  # share of sentences in the character's voice
VOICES = 3
OPENING_WEIGHTS = {
    "upon": 5, "there": 4, "place": 4, "little": 4, "name": 4, "the": 4, "ago": 2, "habit": 2,
    "tell": 1, "day": 5, "morning": 3, "weather": 2, "when": 2, "speech": 1,
}  # fmt: skip
NOT_AN = ("one", "unicorn", "useful", "once")  # a vowel letter, but no vowel sound
SLOT = re.compile(r"\{(\w+)((?:\.\w+|\[\d\])?)\}")


@dataclass(frozen=True)
class Story:
    """One story and what it is about."""

    text: str
    kind: str
    plot: str
    opening: str


def voiced(rng: random.Random, beat: Sequence[str], voice: int) -> str:
    """One alternative of ``beat``, preferably one of the ``voice``."""
    own = beat[voice::VOICES]
    if own and rng.random() < OWN_VOICE:
        return rng.choice(own)
    return rng.choice(beat)


def with_articles(text: str) -> str:
    """``text`` with every "a" before a vowel sound replaced by "an"."""

    def fix(match: re.Match[str]) -> str:
        word = match.group(2).lower()
        return match.group(0) if word in NOT_AN else f"{match.group(1)}n {match.group(2)}"

    return re.sub(r"\b([Aa]) ([aeiouAEIOU]\w*)", fix, text)


def upper_first(text: str) -> str:
    """``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


class Cast:
    """The values of one story's slots."""

    def __init__(self, rng: random.Random, kind: Kind, opening: str) -> None:
        """Draw everything that stays fixed throughout one story of a ``kind``."""
        gender = rng.choice(kind.genders)
        child = kind.noun in ("girl", "boy")
        calls_by_name = opening in ("name", "tell", "habit") or child or rng.random() < 0.6
        name = rng.choice(kind.names) if (calls_by_name and opening != "the") or child else None
        self.place_key = rng.choice(kind.places)
        self.place: Place = PLACES[self.place_key]
        adj, adj2 = rng.sample(kind.adjectives, 2)
        he, him, his, himself = PRONOUNS[gender]
        hero = name or f"the {kind.noun}"
        pastime, spots = rng.choice(self.place.pastimes), rng.sample(self.place.spots, 2)
        named = f" named {name}" if name else ""
        self.voice = (len(kind.noun) + KINDS.index(kind) + (len(name) if name else 0)) % VOICES
        self.slots: dict[str, str] = {
            "hero": hero,
            "hero_s": f"{hero}'s",
            "he": he,
            "him": him,
            "his": his,
            "himself": himself,
            "kind": kind.noun,
            "named": named,
            "a_hero": f"a {adj} {kind.noun}{named}",
            "adj": adj,
            "adj2": adj2,
            "pastime": pastime,
            "spot": spots[0],
            "spot2": spots[1],
            "season": rng.choice(SEASONS),
        }
        self._draw_ally(rng, kind)

    def _draw_ally(self, rng: random.Random, kind: Kind) -> None:
        """Draw a helper of another kind than the hero."""
        ally = ALLIES[rng.choice([k for k in self.place.allies if k != kind.noun])]
        gender = rng.choice(ally.genders)
        names = [n for n in ALLY_NAMES[gender] if n not in kind.names]
        name = rng.choice(names) if rng.random() < 0.25 else None
        he, him, his, _ = PRONOUNS[gender]
        named = f" named {name}" if name else ""
        self.slots |= {
            "ally": name or f"the {ally.noun}",
            "ally_voc": name or f"dear {ally.noun}",
            "an_ally": f"a {rng.choice(ally.looks)} {ally.noun}{named}",
            "says": rng.choice(ally.says),
            "ahe": he,
            "ahim": him,
            "ahis": his,
        }

    def fill(self, rng: random.Random, template: str, row: Sequence[str] = ()) -> str:
        """``template`` with its slots filled; ``row`` holds the alternatives behind ``{p[i]}``."""

        def value(match: re.Match[str]) -> str:
            name, rest = match.group(1), match.group(2)
            key = name[0].lower() + name[1:]
            if key == "p":
                found = self.fill(rng, row[int(rest[1:-1])], row)
            elif key == "place":
                found = getattr(self.place, rest[1:])
            elif key in ("weather", "time"):
                found = rng.choice(WEATHERS if key == "weather" else TIMES)
            else:
                found = self.slots[key]
            return found if name == key else upper_first(found)

        return SLOT.sub(value, template)


def draw_plot(rng: random.Random, kind: Kind) -> tuple[str, list[str]]:
    """A plot's name and its row, with one alternative chosen in each cell."""
    if rng.random() < OWN_PLOT:
        plot, payload = rng.choice(kind.plots).split(":")
    else:
        plot, payload = rng.choice(list(PLOTS)), ""
        if PAYLOADS[plot]:
            payload = rng.choice(list(PAYLOADS[plot]))
    row = PAYLOADS[plot][payload] if payload else []
    return plot, [rng.choice(split(cell)) for cell in row]


def draw_opening(rng: random.Random, kind: Kind) -> str:
    """The name of an opening; children are never introduced as "the girl"."""
    names = [o for o in OPENING_WEIGHTS if o != "the" or kind.noun not in ("girl", "boy")]
    return rng.choices(names, [OPENING_WEIGHTS[o] for o in names])[0]


def story(rng: random.Random) -> Story:
    """One story drawn from ``rng``: three or four paragraphs, separated by empty lines."""
    kind = rng.choice(KINDS)
    opening = draw_opening(rng, kind)
    cast = Cast(rng, kind, opening)
    plot, row = draw_plot(rng, kind)
    if plot == "make":
        cast.slots["need"] = row[3].removeprefix("a ")
    if plot == "storm":
        cast.slots["shelter"] = row[1]

    def tell(beat: Beat) -> str:
        return cast.fill(rng, voiced(rng, beat, cast.voice), row)

    scene = opening in SCENES
    head = [tell((SCENES if scene else STARTS)[opening])]
    head.append(tell(TRAITS) if scene else "")
    cast.slots["when"] = lower_first(tell(ONE_DAY if scene else SOON))
    paragraphs = [[tell(beat) for beat in beats] for beats in PLOTS[plot]]
    paragraphs[-1].append(tell(ENDINGS))
    if scene and rng.random() < 0.5:
        paragraphs.insert(0, head)
    else:
        paragraphs[0] = head + paragraphs[0]
    lines = [" ".join(s for s in sentences if s) for sentences in paragraphs]
    return Story(with_articles("\n\n".join(lines)), kind.noun, plot, opening)


def lower_first(text: str) -> str:
    """``text`` with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def stories(seed: int, count: int) -> list[Story]:
    """``count`` stories; the same ``seed`` gives the same stories everywhere."""
    rng = random.Random(seed)
    return [story(rng) for _ in range(count)]


if __name__ == "__main__":
    for told in stories(seed=0, count=8):
        print(f"[{told.kind}, {told.plot}, {told.opening}]\n{told.text}\n")
