"""Entry point of `python -m kvshift_lab`, also used by `torchrun -m kvshift_lab train ...`."""

from kvshift_lab.cli import run_and_exit

run_and_exit()
