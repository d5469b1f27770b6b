"""Figure 2: the loss of Theorem 3.4 on a square of coefficients, and gradient descent within and beyond it."""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="fig02",
    title="where descent on the loss of induction leads",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on one core"),
        "laptop": Preset(seeds=1, cost="30 seconds on one core"),
        "paper": Preset(seeds=1, cost="2 minutes on one core"),
    },
)
