"""Figure 3 and Table 2: the 2.9B and 19B models, whose sharded training step is tried without allocating memory."""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="fig03",
    title="the 2.9B and the 19B, sharded",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on one core"),
        "laptop": Preset(seeds=1, cost="5 minutes on two cores; nothing is trained"),
        "paper": Preset(seeds=1, cost="4 runs on 512 and 240 GPUs; not measured"),
    },
)
