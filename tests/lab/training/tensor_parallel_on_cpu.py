"""`python -m kvshift` for a machine without GPU on which accelerate is to share out a model all the same.

accelerate refuses tensor parallelism on a CPU; that of transformers itself works there, over gloo.
"""

from accelerate import ParallelismConfig

from kvshift.cli import run_and_exit
from kvshift.lab.training import tensor_parallel

ParallelismConfig._validate_accelerator = lambda self, accelerator: None
tensor_parallel.require_gpu = lambda config: None
run_and_exit()
