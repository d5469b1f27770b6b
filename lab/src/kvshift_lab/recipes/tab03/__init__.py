"""Table 3: the logits behind Theorem 3.4, as printed and as derived, compared with the model's own logits."""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="tab03",
    title="the logits behind Theorem 3.4",
    presets={
        "smoke": Preset(seeds=1, cost="10 seconds on one core"),
        "laptop": Preset(seeds=1, cost="15 seconds on one core"),
        "paper": Preset(seeds=1, cost="a minute on one core"),
    },
)
