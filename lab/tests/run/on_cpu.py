"""`python -m kvshift_lab` on a machine without GPU, with processes that share a run over gloo.

python -m lab.tests.run.on_cpu fsdp train ...

With KILLED_AT, a process kills itself with SIGKILL when that checkpoint is written, before it is sealed as complete.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvshift_lab.cli import run_and_exit
from kvshift_lab.run import trainer


def fsdp() -> None:
    """Use FSDP2, which works on a CPU, although accelerate reads ACCELERATE_USE_FSDP only with GPUs."""
    import accelerate.state

    init = accelerate.state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = with_fsdp


def kill_or_seal(folder: Path, mark_complete: Any = trainer.mark_complete) -> None:
    if folder.name == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    mark_complete(folder)


if __name__ == "__main__":
    {"fsdp": fsdp}[sys.argv.pop(1)]()
    trainer.mark_complete = kill_or_seal
    run_and_exit()
