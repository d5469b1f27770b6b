"""Collective operations of the processes of one run; with a single process, they communicate nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from kvshift_lab.core.errors import LabError

_Result = TypeVar("_Result")

# Timeout of collective operations: the others wait while the first process tokenizes.
COLLECTIVE_TIMEOUT = timedelta(hours=6)


class Processes:
    """The processes that torchrun or accelerate started. If `cpu`, they use no GPUs."""

    def __init__(self, *, cpu: bool) -> None:
        distributed = "RANK" in os.environ
        self._state = PartialState(cpu=cpu, **({"timeout": COLLECTIVE_TIMEOUT} if distributed else {}))
        self.count = self._state.num_processes
        self.is_main = self._state.is_main_process
        self.device = cast(torch.device, self._state.device)

    def main_first(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the first process and return its result in all processes.

        If it raises a LabError, all processes exit with its exit code, and only the first prints its message.
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

    def any_process(self, holds: bool) -> bool:
        """Return True if `holds` is True in at least one process."""
        return self.all_reduce_max(int(holds)) > 0

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum of `number` over all processes."""
        if self.count == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def gather(self, number: float) -> list[float]:
        """Return `number` of all processes, in order of their ranks."""
        return [number] if self.count == 1 else gather_object([number])

    def end(self) -> None:
        """Destroy the process group."""
        if self.count > 1:
            self._state.destroy_process_group()
