"""`python -m kvshift`, which is what `torchrun -m kvshift train ...` starts."""

from kvshift.cli import run_and_exit

run_and_exit()
