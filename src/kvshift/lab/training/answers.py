"""Ask a trained model the questions of a task, and count what the task's judge finds right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from kvshift.lab.core.seeds import seed_for
from kvshift.lab.runs.progress import counted
from kvshift.lab.tasks import generator_of
from kvshift.lab.tasks.questions import Question, QuestionTask
from kvshift.lab.variants.continuing import continue_rows


def ask(
    model: Any, task: QuestionTask, count: int, *, seed: int, batch_size: int, shown: bool = False
) -> dict[str, dict[str, float]]:
    """Put the first `count` questions of `seed` to a model.

    Args:
        model: from `input_ids` and `attention_mask`, with `generate`.
        task: that it was trained on.
        count: of questions.
        seed: of the questions and of what is drawn to answer them.
        batch_size: answers that are generated at a time.
        shown: tell on stderr how many batches are answered.

    Returns:
        By the name of each measure: "share" of right answers, its standard error "stderr" (of a share,
        sqrt(p (1 - p) / n)), and "questions", n.
    """
    # Of the evaluation's half of all seeds, and behind every batch that is evaluated.
    questions = task.questions(generator_of("evaluation", seed, 2**31 - 1), count)
    # Answers of like length end together, and prompts of one length need no padding.
    order = sorted(range(len(questions)), key=lambda number: len(questions[number].prompt))
    right: dict[str, list[bool]] = {}
    for start in counted(range(0, len(order), batch_size), "questions", "batches", shown=shown):
        asked = [questions[number] for number in order[start : start + batch_size]]
        for question, tokens in zip(asked, answer(model, task, asked, seed=seed + start), strict=True):
            for measure, holds in task.judge(question, tokens).items():
                right.setdefault(measure, []).append(bool(holds))
    return {measure: _share(found) for measure, found in sorted(right.items())}


def answer(model: Any, task: QuestionTask, questions: Sequence[Question], *, seed: int) -> list[Tensor]:
    """What the model writes after each prompt, without the task's end token and what follows it: (N,) int64 each."""
    drawn = {"temperature": task.temperature, "top_k": 0, "top_p": 1.0} if task.temperature else {}
    how = GenerationConfig(
        do_sample=task.temperature > 0,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=task.end_token,
        pad_token_id=task.end_token,
        **drawn,
    )
    written = continue_rows(model, [question.prompt for question in questions], how, seed=seed_for("answers", seed))
    return [_before(tokens, task.end_token) for tokens in written.cpu()]


def _before(tokens: Tensor, end: int) -> Tensor:
    ends = (tokens == end).nonzero()
    return tokens[: int(ends[0])] if len(ends) else tokens


def _share(found: Sequence[bool]) -> dict[str, float]:
    share = sum(found) / len(found)
    return {"share": share, "stderr": (share * (1 - share) / len(found)) ** 0.5, "questions": len(found)}
