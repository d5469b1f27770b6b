"""What several processes of one run need to do together; with a single process each of these is nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from kvshift.lab.core.errors import LabError

_Result = TypeVar("_Result")

# The first process tokenizes while the others wait for it.
PATIENCE = timedelta(hours=6)


class Processes:
    """The processes that torchrun or accelerate started; `cpu` keeps them off the GPUs."""

    def __init__(self, *, cpu: bool) -> None:
        distributed = "RANK" in os.environ
        self._state = PartialState(cpu=cpu, **({"timeout": PATIENCE} if distributed else {}))
        self.count = self._state.num_processes
        self.is_main = self._state.is_main_process
        self.device = cast(torch.device, self._state.device)

    def main_first(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the first process and give what it returns to all.

        A LabError there ends every process with its exit code, and only the first with its message.
        """
        if self.count == 1:
            return function()
        outcome: list = [None, None]
        if not self.is_main:
            broadcast_object_list(outcome)
            if outcome[1] is not None:
                raise SystemExit(outcome[1])
            return outcome[0]
        try:
            outcome[0] = function()
        except BaseException as error:
            outcome[1] = error.exit_code if isinstance(error, LabError) else 1
            raise
        finally:
            broadcast_object_list(outcome)
        return outcome[0]

    def any(self, holds: bool) -> bool:
        """Whether it holds in at least one of the processes."""
        return self.most(int(holds)) > 0

    def most(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        if self.count == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def gather(self, number: float) -> list[float]:
        """The numbers that the processes give, in their order."""
        return [number] if self.count == 1 else gather_object([number])

    def end(self) -> None:
        """Take leave of the other processes."""
        if self.count > 1:
            self._state.destroy_process_group()
