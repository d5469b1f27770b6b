"""All recipes: what each is called, its presets and what they cost.

A recipe's module is imported when it is asked for; this one imports nothing that takes time, so that a list of all
recipes needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from kvshift.lab.core.errors import LabError
from kvshift.lab.study.entry import Entry, Grid, Preset

if TYPE_CHECKING:
    from kvshift.lab.study.recipe import Recipe


_ZOOLOGY = Grid(rates=(1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2), seeds=(1000,))  # logspace(-4, -2, 4)

_BY_TWO = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
_BY_THREE = (3e-4, 1e-3, 3e-3, 1e-2)
_TO_16 = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
_INDUCTION = Grid(rates=_TO_16, seeds=(1000,), steps=1500)
_GRAMMAR = Grid(rates=(1.5e-3, 3e-3, 6e-3, 1.2e-2), seeds=(1000,))

_TABLES = {
    "smoke": Grid(rates=(1.6e-2, 3.2e-2), seeds=(1000,)),
    "laptop": Grid(rates=(1.6e-3, 4e-3, 8e-3, 1.6e-2), seeds=(1000,)),  # four times the paper's last four
    "paper": Grid(rates=(1e-4, 2e-4, 4e-4, 1e-3, 2e-3, 4e-3), seeds=(1000,)),
}


def _language_models(name: str, title: str, module: str | None, *, smoke: str, laptop: str, paper: str) -> Entry:
    """A recipe that draws on the runs of the language models; `paper` says what its preset takes, and where."""
    of_tables = module == "language_models.lm_tables"
    costs = {"smoke": smoke, "laptop": laptop, "paper": paper}
    grids = {**_TABLES, "paper": Grid(rates=(2e-3,), seeds=(1000,))} if name == "tab15" else _TABLES
    return Entry(
        name=name,
        title=title,
        presets={
            preset: Preset(
                seeds=1 if preset == "smoke" or (preset == "paper" and not of_tables) else 3,
                cost=cost,
                grid=grids[preset] if of_tables or preset != "paper" else None,
            )
            for preset, cost in costs.items()
        },
        study="language_models",
        module=module,
    )


_A100 = "two hours on 8 A100 each in the paper; not measured"

_ENTRIES = (
    Entry(
        name="fig01a",
        title="one layer learns induction",
        presets={
            "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
            "laptop": Preset(seeds=5, cost="100 minutes on two cores", grid=_INDUCTION),
            "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
        },
        study="induction",
    ),
    Entry(
        name="fig01b",
        title="induction at width 8",
        presets={
            "smoke": Preset(seeds=1, cost="10 seconds on two cores"),
            "laptop": Preset(
                seeds=5, cost="10 minutes on two cores", grid=Grid(rates=(2.5e-3, 5e-3, 1e-2, 2e-2), seeds=(1000,))
            ),
            "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
        },
    ),
    Entry(
        name="fig02",
        title="where descent on the loss of induction leads",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on one core"),
            "laptop": Preset(seeds=1, cost="30 seconds on one core"),
            "paper": Preset(seeds=1, cost="2 minutes on one core"),
        },
    ),
    Entry(
        name="fig08",
        title="hops from letter to letter",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
            "laptop": Preset(seeds=5, cost="2 hours on two cores", grid=Grid(rates=_BY_TWO, seeds=(1000,))),
            "hops8": Preset(
                seeds=3,
                cost="4 hours on two cores",
                grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), seeds=(1000,)),
            ),
            "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
        },
    ),
    Entry(
        name="fig09",
        title="a table of triples, memorized",
        presets={
            "smoke": Preset(seeds=1, cost="10 seconds on two cores"),
            "laptop": Preset(seeds=5, cost="15 minutes on two cores", grid=Grid(rates=_BY_THREE, seeds=(1000,))),
            "paper": Preset(seeds=3, cost="an hour on one GPU; not measured"),
        },
    ),
    Entry(
        name="tab03",
        title="the logits behind Theorem 3.4",
        presets={
            "smoke": Preset(seeds=1, cost="10 seconds on one core"),
            "laptop": Preset(seeds=1, cost="15 seconds on one core"),
            "paper": Preset(seeds=1, cost="a minute on one core"),
        },
    ),
    Entry(
        name="tab04",
        title="grade-school problems",
        presets={
            "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
            "laptop": Preset(seeds=3, cost="80 minutes on two cores", grid=Grid(rates=_BY_TWO, seeds=(1000,))),
            "ye": Preset(seeds=3, cost="130 minutes on two cores", grid=Grid(rates=_BY_TWO, seeds=(1000,))),
            "paper": Preset(seeds=1, cost="4 runs of days each on one GPU; not measured"),
        },
    ),
    Entry(
        name="cfg",
        title="sentences of a grammar",
        presets={
            "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
            "laptop": Preset(seeds=3, cost="20 minutes on two cores", grid=_GRAMMAR),
            "long": Preset(seeds=3, cost="two hours on two cores", grid=Grid(rates=(3e-3, 1.2e-2), seeds=(1000,))),
            "paper": Preset(seeds=3, cost="days on one GPU; not measured"),
        },
    ),
    Entry(
        name="alternatives",
        title="Figure 1a under other readings",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
            "laptop": Preset(
                seeds=5, cost="an hour and a half on two cores, a third of which fig01a shares", grid=_INDUCTION
            ),
            "paper": Preset(seeds=3, cost="a day on one GPU; not measured"),
        },
        study="induction",
    ),
    Entry(
        name="phase",
        title="when induction begins on real text, and what the shift gains before and after",
        presets={
            "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))),
            "laptop": Preset(seeds=5, cost="hours on two cores", grid=Grid(rates=_BY_TWO[1:], seeds=(1000,))),
            "search": Preset(seeds=1, cost="hours on two cores: vanilla alone, in many settings"),
            "paper": Preset(
                seeds=3,
                cost="hours on one GPU; not measured",
                grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3), seeds=(1000,)),
            ),
        },
    ),
    Entry(
        name="decide",
        title="the main claim on real text, at 2, 4 and 8 layers, written down before it was run",
        presets={
            "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))),
            "laptop": Preset(
                seeds=10, cost="ten hours on two cores", grid=Grid(rates=(2e-3, 4e-3, 8e-3), seeds=(1000,))
            ),
            "pilot": Preset(seeds=2, cost="an hour and a half on two cores: what seeds change, before the laptop"),
            "paper": Preset(
                seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3), seeds=(1000,))
            ),
        },
    ),
    Entry(
        name="depth",
        title="whether the gain survives depth",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))),
            "laptop": Preset(seeds=5, cost="an hour on two cores", grid=Grid(rates=_TO_16, seeds=(1000,))),
            "paper": Preset(
                seeds=3,
                cost="hours on one GPU; not measured",
                grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3), seeds=(1000,)),
            ),
        },
    ),
    *(
        _language_models(
            f"tab{number:02}",
            f"losses by learning rate and context: {method}",
            "language_models.lm_tables",
            smoke=f"{10 * variants} seconds on two cores",
            laptop=f"{13 * variants} minutes on two cores; what tables share is run once",
            paper=f"{45 * variants} runs of {_A100}",
        )
        for number, method, variants in (
            (6, "vanilla", 1),
            (7, "KV-shift", 2),
            (8, "QKV-shift", 3),
            (9, "K-shift", 3),
            (10, "V-shift", 3),
            (11, "Differential Transformer", 3),
            (12, "Differential Transformer with QK-norm", 3),
            (13, "Selective Attention", 3),
        )
    ),
    *(
        _language_models(
            name,
            title,
            "language_models.lm_figures",
            smoke="40 seconds on two cores",
            laptop="32 minutes on two cores; what other recipes of the study have run is not run again",
            paper=f"{runs} runs of a model of {size} on many GPUs; not measured",
        )
        for name, title, runs, size in (
            ("fig07a", "keys alone, values alone", 4, "1.5B"),
            ("fig07b", "longer windows", 4, "1.5B"),
            ("fig10", "gates and bounds", 4, "1.5B"),
            ("fig11", "queries too", 3, "19B"),
        )
    ),
    _language_models(
        "tab15",
        "multi-head latent attention, with a hard shift and without",
        "language_models.lm_tables",
        smoke="30 seconds on two cores",
        laptop="35 minutes on two cores",
        paper=f"40 runs of {_A100}",
    ),
    _language_models(
        "tab05",
        "which way the coefficients lean",
        None,
        smoke="15 seconds on two cores",
        laptop="16 minutes on two cores, all of which tab07 shares",
        paper="a run of a model of 2.9B on 512 GPUs; not measured",
    ),
    Entry(
        name="neighbours",
        title="four numbers per head, or per channel, or by the token",
        presets={
            "smoke": Preset(seeds=1, cost="60 seconds on two cores", grid=_TABLES["smoke"]),
            "laptop": Preset(
                seeds=3, cost="35 minutes on two cores, half of which other recipes share", grid=_TABLES["laptop"]
            ),
            "paper": Preset(seeds=3, cost=f"36 runs of {_A100}", grid=_TABLES["paper"]),
        },
        study="language_models",
    ),
    Entry(
        name="fig03",
        title="the 2.9B and the 19B, sharded",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on one core"),
            "laptop": Preset(seeds=1, cost="5 minutes on two cores; nothing is trained"),
            "paper": Preset(seeds=1, cost="4 runs on 512 and 240 GPUs; not measured"),
        },
    ),
    Entry(
        name="fig04",
        title="seeds, learning rates and divergence",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
            "laptop": Preset(seeds=5, cost="40 minutes on two cores"),
            "paper": Preset(seeds=5, cost="40 runs of a model of 1.5B on many GPUs; not measured"),
        },
    ),
    *(
        Entry(
            name=name,
            title=title,
            presets={
                "smoke": Preset(
                    seeds=1, cost=f"{smoke} seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))
                ),
                "laptop": Preset(seeds=3, cost=laptop, grid=Grid(rates=_TO_16, seeds=(1000,))),
                "paper": Preset(seeds=1, cost=f"{runs} on many GPUs; not measured"),
            },
            study="scaling",
            module="scaling.power_law",
        )
        for name, title, smoke, laptop, runs in (
            ("fig05", "losses by size", 60, "an hour on two cores", "6 runs of models of 1.5B to 13B"),
            (
                "fig06",
                "the power law, and three times the tokens",
                80,
                "80 minutes on two cores, an hour of which fig05 shares",
                "12 runs of models of 1.5B to 19B",
            ),
        )
    ),
    Entry(
        name="encoder",
        title="masked words, with a shift in both directions",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))),
            "laptop": Preset(
                seeds=5,
                cost="an hour on two cores",
                grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3), seeds=(1000,)),
            ),
            "paper": Preset(
                seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3), seeds=(1000,))
            ),
        },
    ),
    Entry(
        name="retrofit",
        title="a model that learned without the shift, and is given one",
        presets={
            "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 1e-2), seeds=(1000,))),
            "laptop": Preset(
                seeds=3,
                cost="three hours on two cores, after `make smollm`",
                grid=Grid(rates=(5e-4, 2e-3, 8e-3, 3.2e-2), seeds=(1000,)),
            ),
            "longer": Preset(seeds=2, cost="two hours on two cores"),
            "paper": Preset(
                seeds=5,
                cost="hours on one GPU; not measured",
                grid=Grid(rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), seeds=(1000, 1001)),
            ),
        },
    ),
    Entry(
        name="mqar",
        title="recall of many pairs",
        presets={
            "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3), seeds=(1000,))),
            "laptop": Preset(
                seeds=5,
                cost="an hour on two cores",
                grid=Grid(rates=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2), seeds=(1000, 1001)),
            ),
            "paper": Preset(
                seeds=1,
                cost="240 runs on a GPU; not measured",
                grid=_ZOOLOGY,
            ),
        },
    ),
)
CATALOGUE: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in CATALOGUE:
        raise LabError(f"recipe: there is no {name!r}; there are {', '.join(CATALOGUE)}")
    module = CATALOGUE[name].module
    found = import_module(f"kvshift.recipes.{module or name + '.study'}")
    return found.RECIPE if module is None else found.RECIPES[name]
