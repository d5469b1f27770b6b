"""Entry point of `python -m kvshift`, also used by `torchrun -m kvshift train ...`."""

from kvshift.cli import run_and_exit

run_and_exit()
