"""Registry of all tasks by name. To add a task, write a module and add an entry to `TASKS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

from kvshift_lab.tasks.batch import Batch, Task
from kvshift_lab.tasks.cfg import CFGConfig, CFGTask
from kvshift_lab.tasks.hop import HopConfig, HopTask
from kvshift_lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift_lab.tasks.induction import InductionConfig, InductionTask
from kvshift_lab.tasks.masked_text import MaskedTextConfig, MaskedTextTask
from kvshift_lab.tasks.mqar import MQARConfig, MQARTask
from kvshift_lab.tasks.ngram import NGramConfig, NGramTask


class TaskConfig(Protocol):
    """The options of a task: a frozen dataclass with JSON-serializable fields that rejects invalid values."""

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
    """A task with a finite evaluation set, which fits into one batch."""

    def whole_table(self) -> Batch:
        """Return the evaluation set, each sequence once."""
        ...


def make_task(config: TaskConfig) -> Task:
    """Return the task that `config` describes."""
    return TASKS[task_name(config)][1](config)


def config_class(name: str) -> type[TaskConfig]:
    """Return the config class of the task called `name`, the inverse of `task_name`."""
    return TASKS[name][0]


def task_name(config: TaskConfig) -> str:
    """Return the name of the task of `config` in files and messages."""
    for name, (kind, _) in TASKS.items():
        if type(config) is kind:
            return name
    raise TypeError(f"config must be the config of a task ({', '.join(TASKS)}), got {type(config).__name__}")
