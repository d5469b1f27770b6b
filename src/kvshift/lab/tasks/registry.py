"""All tasks by name: from a config to its task. A new task is one module and one entry in `TASKS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from kvshift.lab.tasks.batch import Batch, Task
from kvshift.lab.tasks.cfg import CFGConfig, CFGTask
from kvshift.lab.tasks.hop import HopConfig, HopTask
from kvshift.lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift.lab.tasks.induction import InductionConfig, InductionTask
from kvshift.lab.tasks.masked_text import MaskedTextConfig, MaskedTextTask
from kvshift.lab.tasks.mqar import MQARConfig, MQARTask
from kvshift.lab.tasks.ngram import NGramConfig, NGramTask


class TaskConfig(Protocol):
    """The options of a task: a frozen dataclass whose fields JSON can hold, and which refuses what cannot be."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


TASKS: dict[str, tuple[type[TaskConfig], Callable[[Any], Task]]] = {
    "cfg": (CFGConfig, CFGTask),
    "hop": (HopConfig, HopTask),
    "igsm": (IGSMConfig, IGSMTask),
    "induction": (InductionConfig, InductionTask),
    "masked_text": (MaskedTextConfig, MaskedTextTask),
    "mqar": (MQARConfig, MQARTask),
    "ngram": (NGramConfig, NGramTask),
}


@runtime_checkable
class WholeTask(Task, Protocol):
    """A task with an end: all it can ask fits into one batch, which is its evaluation set."""

    def whole_table(self) -> Batch:
        """Each of its sequences once."""
        ...


def make_task(config: TaskConfig) -> Task:
    """The task that `config` describes."""
    return TASKS[task_name(config)][1](config)


def config_class(name: str) -> type[TaskConfig]:
    """The inverse of `task_name`."""
    return TASKS[name][0]


def task_name(config: TaskConfig) -> str:
    """What files and messages call the task of `config`."""
    for name, (kind, _) in TASKS.items():
        if type(config) is kind:
            return name
    raise TypeError(f"config must be the config of a task ({', '.join(TASKS)}), got {type(config).__name__}")
