"""`python -m kvshift` for a machine without GPU on which accelerate is to shard all the same.

accelerate heeds ACCELERATE_USE_FSDP on GPUs alone; FSDP2 itself works on a CPU, over gloo.
"""

from typing import Any

import accelerate.state
from accelerate import DistributedType

from kvshift.cli import run_and_exit

_begin = accelerate.state.AcceleratorState.__init__


def begin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


accelerate.state.AcceleratorState.__init__ = begin
run_and_exit()
