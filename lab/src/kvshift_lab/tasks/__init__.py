"""Tasks with exactly computed targets, which show what a kind of attention can and cannot do."""

# ruff: noqa: F401  # docs/tasks.md and the recipes import these names
from kvshift_lab.tasks.batch import Batch, Task, concatenate, count_correct
from kvshift_lab.tasks.cfg import CFG3F, CFG3S, CFGConfig, CFGGrammar, CFGTask
from kvshift_lab.tasks.hop import HopConfig, HopTask
from kvshift_lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift_lab.tasks.induction import InductionConfig, InductionTask
from kvshift_lab.tasks.masked_text import MaskedTextConfig, MaskedTextTask
from kvshift_lab.tasks.mqar import MQARConfig, MQARTask
from kvshift_lab.tasks.ngram import NGramConfig, NGramTask
from kvshift_lab.tasks.questions import Question, QuestionTask
from kvshift_lab.tasks.registry import TaskConfig, WholeTask, config_class, make_task, task_name
from kvshift_lab.tasks.streams import TaskBatches, batch_generator, evaluation_batches
