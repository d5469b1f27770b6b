"""Do the start values of the coefficients decide how soon models begin to copy?"""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="start_values",
    title="how soon models begin to copy, by the start values of their coefficients",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
        "laptop": Preset(seeds=6, cost="half an hour on two cores"),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
    },
)
