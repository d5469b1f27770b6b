"""`python -m kvshift` for a machine without GPU on which DeepSpeed is to run all the same, over gloo."""

import sys

import deepspeed  # pyright: ignore[reportMissingImports]

from kvshift.cli import run_and_exit

from .killed_in_a_save import kill_where_told

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled
deepspeed.init_distributed(dist_backend="gloo")
kill_where_told()
run_and_exit()
