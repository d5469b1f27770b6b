"""The records of runs that are in the folder of a comparison."""

from pathlib import Path

from kvshift_lab.commands.compare.command import CompareJob
from kvshift_lab.commands.compare.report import run_folder
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.records import record_of


def records(out, seeds, variants=("vanilla", "kv-shift")):
    """Return the records of all variants with each seed, the baseline first."""
    runs = [(seed, variant) for seed in seeds for variant in variants]
    return [
        record_of(
            CompareJob(arm=Arm(variant=variant), config=TrainConfig(out=Path(), seed=seed)),
            run_folder(out, seed, variant),
        )
        for seed, variant in runs
    ]
