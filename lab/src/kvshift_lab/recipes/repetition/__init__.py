"""Do language models with KV shift repeat themselves less often in what they generate?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="repetition",
    title="how much greedy and sampled continuations repeat themselves",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=6, cost="half an hour on two cores", grid=Grid(rates=(2e-3, 4e-3, 8e-3, 16e-3))),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3))),
    },
)
