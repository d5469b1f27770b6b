"""A module's name says what it holds: no two share one, but for those that are named alike on purpose."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import kvshift

ALIKE = {
    "__init__",
    "__main__",  # of the command and of the theory's checks
    "shift",  # the operator and its layer: one stem names both
    "options",  # layers: those of the shift; lab: what every option says of itself
    "study",  # of each recipe, which is a folder
    "task",  # of each task that is a folder
    "configuration",  # models: the fields of the shift; models/llama, models/baichuan_m1: the families that have them
    "modeling",  # of these two families, as in transformers
}


def test_no_two_modules_share_a_name():
    root = Path(kvshift.__file__).parent
    homes: dict[str, list[str]] = defaultdict(list)
    for path in root.rglob("*.py"):
        homes[path.stem].append(str(path.relative_to(root)))
    assert {stem: found for stem, found in homes.items() if len(found) > 1 and stem not in ALIKE} == {}
    assert not {stem for stem in ALIKE if len(homes[stem]) < 2}, "no longer alike"
