"""Generate a trained model's answers to the questions of a task and compute how many of them are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from kvshift_lab.core.seeds import seed_for
from kvshift_lab.run.progress import with_progress
from kvshift_lab.tasks import batch_generator
from kvshift_lab.tasks.questions import Question, QuestionTask
from kvshift_lab.variants.continuing import continue_rows


def answer_accuracy(
    model: Any, task: QuestionTask, count: int, *, seed: int, batch_size: int, shown: bool = False
) -> dict[str, dict[str, float]]:
    """Compute a model's accuracy on the first `count` questions of `seed`.

    Args:
        model: a model with `generate`, which takes `input_ids` and `attention_mask`.
        task: the task on which the model was trained.
        count: number of questions.
        seed: random seed of the questions and of sampling the answers.
        batch_size: number of answers to generate at a time.
        shown: whether to report on stderr how many batches are done.

    Returns:
        For each measure, by its name: "share", the fraction p of right answers; "stderr", its standard error
        sqrt(p (1 - p) / n); and "questions", their number n.
    """
    # The seed is in the half of all seeds reserved for evaluation, behind the seeds of all evaluation batches.
    questions = task.questions(batch_generator("evaluation", seed, 2**31 - 1), count)
    # Answers of similar length end together, and prompts of equal length need no padding.
    order = sorted(range(len(questions)), key=lambda number: len(questions[number].prompt))
    right: dict[str, list[bool]] = {}
    for start in with_progress(range(0, len(order), batch_size), "questions", "batches", shown=shown):
        asked = [questions[number] for number in order[start : start + batch_size]]
        for question, tokens in zip(asked, generate_answers(model, task, asked, seed=seed + start), strict=True):
            for measure, holds in task.judge(question, tokens).items():
                right.setdefault(measure, []).append(bool(holds))
    return {measure: _share(found) for measure, found in sorted(right.items())}


def generate_answers(model: Any, task: QuestionTask, questions: Sequence[Question], *, seed: int) -> list[Tensor]:
    """Return the generated tokens for each prompt, (N,) int64, cut off before the task's end token."""
    drawn = {"temperature": task.temperature, "top_k": 0, "top_p": 1.0} if task.temperature else {}
    generation_config = GenerationConfig(
        do_sample=task.temperature > 0,
        max_new_tokens=task.max_new_tokens,
        eos_token_id=task.end_token,
        pad_token_id=task.end_token,
        **drawn,
    )
    written = continue_rows(
        model, [question.prompt for question in questions], generation_config, seed=seed_for("answers", seed)
    )
    return [_before(tokens, task.end_token) for tokens in written.cpu()]


def _before(tokens: Tensor, end: int) -> Tensor:
    ends = (tokens == end).nonzero()
    return tokens[: int(ends[0])] if len(ends) else tokens


def _share(found: Sequence[bool]) -> dict[str, float]:
    share = sum(found) / len(found)
    return {"share": share, "stderr": (share * (1 - share) / len(found)) ** 0.5, "questions": len(found)}
