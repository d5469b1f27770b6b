"""Tasks with exactly computed targets, which show what a kind of attention can and cannot do."""

# ruff: noqa: F401  # docs/tasks.md and the recipes import these names
from kvshift.lab.tasks.batch import Batch, Task, concatenate, count_correct
from kvshift.lab.tasks.cfg import CFG3F, CFG3S, CFGConfig, CFGGrammar, CFGTask
from kvshift.lab.tasks.hop import HopConfig, HopTask
from kvshift.lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift.lab.tasks.induction import InductionConfig, InductionTask
from kvshift.lab.tasks.masked_text import MaskedTextConfig, MaskedTextTask
from kvshift.lab.tasks.mqar import MQARConfig, MQARTask
from kvshift.lab.tasks.ngram import NGramConfig, NGramTask
from kvshift.lab.tasks.questions import Question, QuestionTask
from kvshift.lab.tasks.registry import TaskConfig, WholeTask, config_class, make_task, task_name
from kvshift.lab.tasks.streams import TaskBatches, batch_generator, evaluation_batches
