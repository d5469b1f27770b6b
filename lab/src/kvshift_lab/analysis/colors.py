"""Colors of variants, the same in all figures, from the color-blind safe palette of Okabe and Ito."""

from __future__ import annotations

from collections.abc import Iterable

from kvshift_lab.variants.by_name import VARIANTS

VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE = "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
GREY = "#777777"

_VARIANTS = {entry.label: entry.color for entry in VARIANTS.values()}
_SPARE = (SKY_BLUE, GREY, GREEN, PURPLE, ORANGE)
_MARKED, _MARKERS = {"vanilla": "o", "KV-shift": "s"}, "^Dv<>PX"


def colors_of(variants: Iterable[str]) -> dict[str, str]:
    """Return the color of each variant; variants without a fixed color get unused ones, as long as there are any.

    Args:
        variants: Labels of variants in runs and recipes: "vanilla", "KV-shift" ...
    """
    names = list(dict.fromkeys(variants))
    found = {name: _VARIANTS[name] for name in names if name in _VARIANTS}
    free = [color for color in (*_SPARE, *reversed(_VARIANTS.values())) if color not in found.values()]
    others = sorted(name for name in names if name not in found)
    return found | {name: free[number % len(free)] for number, name in enumerate(others)}


def shades(color: str, count: int) -> list[str]:
    """Return `count` shades of a color: the color itself, then alternately paler and darker ones."""
    channels = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    found = []
    for number in range(count):
        end, share = (255, 0.5) if number % 2 else (0, 0.55)
        share = share * ((number + 1) // 2) / max(1, count // 2)
        found.append("#" + "".join(f"{round(value + (end - value) * share):02x}" for value in channels))
    return found


def marker_of(variant: str, variants: Iterable[str]) -> str:
    """Return the marker of a variant, which distinguishes its curve without color."""
    others = [name for name in dict.fromkeys(variants) if name not in _MARKED]
    return _MARKED.get(variant) or _MARKERS[others.index(variant) % len(_MARKERS)]
