"""Task options that contradict themselves or each other are refused with a message that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshift_lab.core.errors import LabError
from kvshift_lab.tasks import (
    CFGConfig,
    HopConfig,
    IGSMConfig,
    InductionConfig,
    MaskedTextConfig,
    MQARConfig,
    NGramConfig,
    QuestionTask,
    Task,
)

from .cases import TASKS


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (InductionConfig, {"mode": "printed"}, "induction.mode must be one of script, latest, raw, single, got 'print"),
        (InductionConfig, {"loss": "none"}, "induction.loss must be one of all, repeats, got 'none'"),
        (InductionConfig, {"length": 3}, "induction.length must be 4 or more in mode script, got 3"),
        (InductionConfig, {"mode": "single", "length": 5}, "induction.length must be 6 or more in mode single, got 5"),
        (InductionConfig, {"lowest_id": 0}, r"induction.lowest_id must be 1 or more \(0 pads\), got 0"),
        (InductionConfig, {"mode": "single", "pool": 9}, "induction.pool must be None in mode single"),
        (InductionConfig, {"pool": 1}, "induction.pool must be between 2 and the 7989 ids .* got 1"),
        (InductionConfig, {"vocab_size": 256}, "induction.pool must be between 2 and the 245 ids .* got 512"),
        (MQARConfig, {"pairs": 0}, "mqar.pairs must be 1 or more, got 0"),
        (MQARConfig, {"length": 65}, r"mqar.length must be even and at least 4 \* pairs = 16 .* got 65"),
        (MQARConfig, {"length": 14}, r"mqar.length must be even and at least 4 \* pairs = 16 .* got 14"),
        (MQARConfig, {"vocab_size": 9}, "mqar.vocab_size must be 10 or more for 4 pairs, got 9"),
        (MQARConfig, {"filler": "blank"}, "mqar.filler must be one of zero, random, got 'blank'"),
        (HopConfig, {"letters": 0}, "hop.letters must be 1 or more, got 0"),
        (HopConfig, {"alphabet": 1}, "hop.alphabet must be 2 or more, got 1"),
        (HopConfig, {"max_hops": -1}, "hop.max_hops must be 0 or more, got -1"),
        (HopConfig, {"hops": 17}, "hop.hops must be None or in 0 ... max_hops = 16, got 17"),
        (NGramConfig, {"vocab_size": 1}, "ngram.vocab_size must be 2 or more, got 1"),
        (NGramConfig, {"pairs": 0}, "ngram.pairs must be 1 or more, got 0"),
        (NGramConfig, {"length": 0}, "ngram.length must be 3 or more, got 0"),
        (NGramConfig, {"length": 512}, "ngram.length must be a multiple of 3, got 512"),
        (CFGConfig, {"length": 1}, "cfg.length must be 2 or more, got 1"),
        (CFGConfig, {"prefix": 0}, "cfg.prefix must be 1 or more, got 0"),
        (CFGConfig, {"prefix": 64}, "cfg.prefix must be below 64, the length of the shortest sentence .*, got 64"),
        (CFGConfig, {"temperature": -1.0}, "cfg.temperature must be 0 or more, got -1.0"),
        (IGSMConfig, {"generator": "gsm"}, "igsm.generator must be one of kamino, igsm, got 'gsm'"),
        (IGSMConfig, {"ops": 0}, "igsm.ops must be 1 or more, got 0"),
        (IGSMConfig, {"ops": 27}, "igsm.ops must be 26 or less"),
        (IGSMConfig, {"letters": "random", "ops": 41}, "igsm.ops must be 40 or less .there are 40 items., got 41"),
        (IGSMConfig, {"letters": "shuffled"}, "igsm.letters must be one of in_order, random, got 'shuffled'"),
        (IGSMConfig, {"modulus": 1}, r"igsm.modulus must be 2 \.\.\. 23, got 1"),
        (IGSMConfig, {"modulus": 24}, r"igsm.modulus must be 2 \.\.\. 23, got 24"),
        (IGSMConfig, {"test_ops": 28}, "igsm.test_ops must be 26 or less .solutions name quantities a ... z., got 28"),
        (IGSMConfig, {"generator": "igsm", "test_ops": 53}, "igsm.test_ops must be 52 or less"),
        (IGSMConfig, {"temperature": -1.0}, "igsm.temperature must be 0 or more"),
        (IGSMConfig, {"max_new_tokens": 0}, "igsm.max_new_tokens must be None, or 1 or more, got 0"),
        (IGSMConfig, {"as_printed": True, "generator": "igsm"}, "igsm.as_printed needs .* kamino, got igsm"),
        (IGSMConfig, {"max_items": 11}, "igsm.max_items must be 10 or less"),
        (IGSMConfig, {"as_printed": True, "max_items": 7, "max_operations": 27}, "igsm.max_operations must be 26 or"),
        (MaskedTextConfig, {"masked": 0.0}, "masked_text.masked must be between 0 and 1"),
        (MaskedTextConfig, {"length": 1}, "masked_text.length must be 2"),
    ],
)
def test_what_cannot_be_is_refused(config: type, options: dict[str, Any], message: str):
    with pytest.raises(LabError, match=message):
        config(**options)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_batch_without_sequences_and_no_questions_are_refused(task: Task):
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        task.batch(torch.Generator(), 0)
    if isinstance(task, QuestionTask):
        with pytest.raises(ValueError, match="count must be 1 or more, got 0"):
            task.questions(torch.Generator(), 0)
