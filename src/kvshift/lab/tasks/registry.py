"""All tasks by name: from a config to its task."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvshift.lab.tasks.batch import Batch, Task
from kvshift.lab.tasks.cfg import CFGConfig, CFGTask
from kvshift.lab.tasks.hop import HopConfig, HopTask
from kvshift.lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift.lab.tasks.induction import InductionConfig, InductionTask
from kvshift.lab.tasks.mqar import MQARConfig, MQARTask
from kvshift.lab.tasks.ngram import NGramConfig, NGramTask

__all__ = ["TaskConfig", "WholeTask", "config_class", "make_task", "task_name"]

TaskConfig = CFGConfig | HopConfig | IGSMConfig | InductionConfig | MQARConfig | NGramConfig

_TASKS = {
    "cfg": (CFGConfig, CFGTask),
    "hop": (HopConfig, HopTask),
    "igsm": (IGSMConfig, IGSMTask),
    "induction": (InductionConfig, InductionTask),
    "mqar": (MQARConfig, MQARTask),
    "ngram": (NGramConfig, NGramTask),
}


@runtime_checkable
class WholeTask(Task, Protocol):
    """A task with an end: all it can ask fits into one batch, which is its evaluation set."""

    def whole_table(self) -> Batch:
        """Each of its rows once."""
        ...


def make_task(config: TaskConfig) -> Task:
    """The task that `config` describes."""
    return _TASKS[task_name(config)][1](config)  # type: ignore[arg-type]  # the entry with this config's type


def config_class(name: str) -> type[TaskConfig]:
    """The inverse of `task_name`."""
    return _TASKS[name][0]


def task_name(config: TaskConfig) -> str:
    """What files and messages call the task of `config`."""
    for name, (kind, _) in _TASKS.items():
        if type(config) is kind:
            return name
    raise TypeError(f"config must be the config of a task ({', '.join(_TASKS)}), got {type(config).__name__}")
