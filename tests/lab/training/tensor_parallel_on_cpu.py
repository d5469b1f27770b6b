"""`python -m kvshift` for a machine without GPU on which processes are to share a model all the same.

accelerate refuses tensor parallelism on a CPU; that of transformers itself works there, over gloo. Each process says
how many numbers it holds.
"""

import sys
from typing import Any

from accelerate import ParallelismConfig

from kvshift.cli import run_and_exit
from kvshift.lab.training import tensor_parallel, train

from .killed_in_a_save import kill_where_told

_divide = tensor_parallel.divide


def divide(*args: Any) -> Any:
    model = _divide(*args)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    print(f"holds {held} of {sum(p.numel() for p in model.parameters())}", file=sys.stderr)
    return model


ParallelismConfig._validate_accelerator = lambda self, accelerator: None
tensor_parallel.require_gpu = lambda config: None
train.divide = divide
kill_where_told()
run_and_exit()
