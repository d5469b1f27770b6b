"""Module names are unique, except for those that are the same on purpose."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import kvshift

ALIKE = {
    "__init__",
    "__main__",  # kvshift's command and the theory's checks
    "shift",  # the operator and its layer
    "options",  # layers: options of the shift; lab: metadata of every option
    "study",  # one in the folder of each recipe
    "task",  # one in the folder of each task that has a folder
    "configuration",  # models: the fields of the shift; models/llama, models/baichuan_m1: the families' configurations
    "modeling",  # one for each of these two families, as in transformers
}


def test_no_two_modules_share_a_name():
    root = Path(kvshift.__file__).parent
    homes: dict[str, list[str]] = defaultdict(list)
    for path in root.rglob("*.py"):
        homes[path.stem].append(str(path.relative_to(root)))
    assert {stem: found for stem, found in homes.items() if len(found) > 1 and stem not in ALIKE} == {}
    assert not {stem for stem in ALIKE if len(homes[stem]) < 2}, "no longer alike"
