"""`python -m kvshift_lab` on a machine without GPU, with processes that share a run over gloo.

python -m lab.tests.runs.on_cpu fsdp|deepspeed|tensor_parallel train ...

With KILLED_AT, a process kills itself with SIGKILL when that checkpoint is written, before it is sealed as complete.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvshift_lab.cli import run_and_exit
from kvshift_lab.training import tensor_parallel, train, trainer


def fsdp() -> None:
    """Use FSDP2, which works on a CPU, although accelerate reads ACCELERATE_USE_FSDP only with GPUs."""
    import accelerate.state

    init = accelerate.state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = with_fsdp


def deepspeed() -> None:
    import deepspeed  # pyright: ignore[reportMissingImports]

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled
    deepspeed.init_distributed(dist_backend="gloo")


def tensor_parallelism() -> None:
    """Use tensor parallelism, which accelerate refuses on a CPU; each process prints how many numbers it holds."""
    from accelerate import ParallelismConfig

    def shard_model(*args: Any, shard_model: Any = tensor_parallel.shard_model) -> Any:
        model = shard_model(*args)
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        print(f"holds {held} of {sum(p.numel() for p in model.parameters())}", file=sys.stderr)
        return model

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    tensor_parallel.require_gpu = lambda config: None
    train.shard_model = shard_model


def kill_or_seal(folder: Path, mark_complete: Any = trainer.mark_complete) -> None:
    if folder.name == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    mark_complete(folder)


if __name__ == "__main__":
    {"fsdp": fsdp, "deepspeed": deepspeed, "tensor_parallel": tensor_parallelism}[sys.argv.pop(1)]()
    trainer.mark_complete = kill_or_seal
    run_and_exit()
