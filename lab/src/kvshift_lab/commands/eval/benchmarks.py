"""The benchmarks of the paper as tasks of lm-eval: their prompts, and how answers are scored.

Multiple choice by letters, in the format of MMLU (Hendrycks et al. 2021), 5-shot:

    The following are multiple choice questions (with answers) about anatomy.

    What is the embryological origin of the hyoid bone?
    A. The first pharyngeal arch
    ...
    D. The second and third pharyngeal arches
    Answer: D

    <four more examples, and the question up to "Answer:"; " A" to " D" are scored>

In the text or cloze format of Waleffe et al. (2024), the prompt is the question and "Answer:", and the text of each
choice is scored. If a prompt is too long for a model, whole examples are dropped, the first one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple

from kvshift_lab.commands.eval.items import Item, Questions
from kvshift_lab.core.errors import LabError, nearest

_LETTERS = "ABCDEFGH"

# Maximum number of tokens in a generated MATH solution; half of the model's context length if that is less.
LONGEST_SOLUTION = 512


class FormattedQuestion(NamedTuple):
    """A formatted question, without examples.

    Attributes:
        prompt: The text before the answer; for WinoGrande the end of the sentence.
        answers: Texts to score, each after the benchmark's delimiter; for WinoGrande the beginnings before `prompt`.
        gold: Index of the correct answer.
    """

    prompt: str
    answers: tuple[str, ...]
    gold: int


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How the questions of `source` are formatted and scored.

    Attributes:
        source: Name of the questions in `read_questions`.
        kind: How a model answers. choice: the answer of highest log-likelihood; beginning: the beginning that makes the
            end most likely; word: greedy decoding must produce the answer; solution: the answer in the last \\boxed{}.
        format_question: Formats a question.
        shots: Number of examples before the question, of the same subject, in the order of the data.
        metric: The metric of lm-eval that is reported as the score.
        delimiter: Text between a question and its answer.
        header: Returns the text before all examples, given the subject.
    """

    source: str
    kind: Literal["choice", "beginning", "word", "solution"]
    format_question: Callable[[Item], FormattedQuestion]
    shots: int = 0
    metric: str = "acc"
    delimiter: str = " "
    header: Callable[[str], str] = lambda subject: ""


def _plain(item: Item, begin: str = "", end: str = "") -> FormattedQuestion:
    return FormattedQuestion(begin + item.question + end, item.answers, item.gold)


def _letters(item: Item, begin: str = "", end: str = "\nAnswer:") -> FormattedQuestion:
    letters = _LETTERS[: len(item.answers)]
    lines = (f"\n{letter}. {answer}" for letter, answer in zip(letters, item.answers, strict=True))
    return FormattedQuestion(begin + item.question + "".join(lines) + end, tuple(letters), item.gold)


def _gap_letters(item: Item) -> FormattedQuestion:
    """Format the sentence with a gap, and as choices the words in which the two beginnings differ."""
    one, other = (answer.split(" ") for answer in item.answers)
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)) - 1)
    fills = (" ".join(one[same:]), " ".join(other[same:]))
    return _letters(Item(" ".join([*one[:same], "_", item.question]), fills, item.gold))


def _header(subject: str) -> str:
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def _chinese_header(subject: str) -> str:
    return f"以下是关于{_chinese_name(subject)}的单项选择题，请直接给出正确答案的选项。\n\n"


@cache
def _chinese_name(subject: str) -> str:
    """Return the Chinese name of a subject, from the files of lm-eval's own CMMLU tasks."""
    import yaml

    file = files("lm_eval") / "tasks" / "cmmlu" / f"cmmlu_{subject}.yaml"
    task = yaml.safe_load(file.read_text(encoding="utf-8"))
    return task["description"].split("以下是关于")[1].split("的单项选择题")[0]


_MMLU = Benchmark(source="mmlu", kind="choice", format_question=_letters, header=_header)
_CMMLU = Benchmark(
    source="cmmlu",
    kind="choice",
    format_question=partial(_letters, begin="题目：", end="\n答案是："),
    delimiter="",
    header=_chinese_header,
)
_ARC_LETTERS = partial(_letters, begin="Question: ")
_ARC_TEXT = partial(_plain, begin="Question: ", end="\nAnswer:")

BENCHMARKS = {
    "lambada": Benchmark(source="lambada", kind="word", format_question=_plain),
    "winogrande": Benchmark(source="winogrande", kind="beginning", format_question=_plain),
    "winogrande_letters": Benchmark(source="winogrande", kind="choice", format_question=_gap_letters),
    "hellaswag": Benchmark(source="hellaswag", kind="choice", format_question=_plain),
    "arc_easy": Benchmark(source="arc_easy", kind="choice", format_question=_ARC_LETTERS, shots=5),
    "arc_easy_text": Benchmark(source="arc_easy", kind="choice", format_question=_ARC_TEXT),
    "arc_challenge": Benchmark(source="arc_challenge", kind="choice", format_question=_ARC_LETTERS, shots=5),
    "arc_challenge_text": Benchmark(source="arc_challenge", kind="choice", format_question=_ARC_TEXT),
    "cmmlu": replace(_CMMLU, shots=5),
    "cmmlu_zero": _CMMLU,
    "mmlu": replace(_MMLU, shots=5),
    "mmlu_zero": _MMLU,
    "mmlu_cloze": Benchmark(
        source="mmlu", kind="choice", format_question=partial(_plain, end="\nAnswer:"), metric="acc_norm"
    ),
    "math": Benchmark(
        source="math",
        kind="solution",
        format_question=partial(_plain, begin="Problem:\n", end="\n\nSolution:"),
        shots=4,
        metric="exact_match",
    ),
}
PAPER = ("lambada", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "cmmlu", "mmlu", "math")
"""The benchmarks of Table 2 of the paper; its average is their unweighted mean."""

_GROUPS = {"paper": PAPER, "table14": ("mmlu_cloze", "mmlu_zero", "mmlu")}


def select(names: Iterable[str]) -> list[str]:
    """Return the names of the selected benchmarks without duplicates; "paper" and "table14" name groups of them.

    Raises:
        LabError: There is no benchmark or group of that name.
    """
    chosen: dict[str, None] = {}
    for name in names:
        if name not in BENCHMARKS and name not in _GROUPS:
            raise LabError(f"tasks: there is no {name!r}; {nearest(name, [*_GROUPS, *BENCHMARKS])}")
        chosen |= dict.fromkeys(_GROUPS.get(name, (name,)))
    return list(chosen)


def prompts(
    benchmark: Benchmark, questions: Questions, fits: Callable[[str, str], bool], limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a record for each question, for `make_task`.

    A record has "prompt", "answers", "gold" and "subject"; "shots", the number of examples in the prompt; and "whole",
    whether the prompt fits into the model's context after examples were dropped.

    If the data has no separate examples, the first other questions of the subject are used as examples.

    Args:
        fits: Returns whether a prompt and an answer together fit into the model's context.
        limit: Number of questions to use, from the first. None: all.
    """
    pools: dict[str, list[Item]] = {}
    for item in questions.examples or questions.tests:
        pools.setdefault(item.subject, []).append(item)
    for item in questions.tests[:limit]:
        formatted = benchmark.format_question(item)
        others = (other for other in pools.get(item.subject, ()) if other != item)
        examples = [_format_example(benchmark, other) for other in islice(others, benchmark.shots)]
        prompt, whole = formatted.prompt, True
        if benchmark.kind != "beginning":
            head, longest = benchmark.header(item.subject), max(formatted.answers, key=len)
            answer = "" if benchmark.kind == "solution" else benchmark.delimiter + longest
            while not (whole := fits(head + "".join(examples) + formatted.prompt, answer)) and examples:
                del examples[0]
            prompt = head + "".join(examples) + formatted.prompt
        yield {
            "prompt": prompt,
            "answers": list(formatted.answers),
            "gold": formatted.gold,
            "subject": item.subject,
            "shots": len(examples),
            "whole": whole,
        }


def _format_example(benchmark: Benchmark, item: Item) -> str:
    formatted = benchmark.format_question(item)
    return f"{formatted.prompt}{benchmark.delimiter}{formatted.answers[formatted.gold]}\n\n"


def make_task(name: str, records: list[dict[str, Any]], *, longest_solution: int = LONGEST_SOLUTION) -> Any:
    """Return a `ConfigurableTask` of lm-eval for `lm_eval.evaluate` and `lm_eval.simple_evaluate`.

    Args:
        records: The records of `prompts`.
        longest_solution: Maximum number of tokens that a model may generate for a solution.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    benchmark = BENCHMARKS[name]
    scoring: dict[str, Any] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "answers",
            "doc_to_target": "gold",
            "metric_list": [_mean("acc"), _mean("acc_norm"), _mean("acc_bytes")],
        },
        "beginning": {  # an index in place of a text makes lm-eval use the choices as contexts
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "answers",
            "doc_to_target": "prompt",
            "metric_list": [_mean("acc")],
        },
        "word": {
            "output_type": "loglikelihood",
            "doc_to_text": "prompt",
            "doc_to_target": lambda record: benchmark.delimiter + record["answers"][0],
            "metric_list": [_mean("acc"), {"metric": "perplexity", "aggregation": "perplexity"}],
        },
        "solution": {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": lambda record: record["answers"][1],
            "generation_kwargs": {"until": ["Problem:"], "do_sample": False, "max_gen_toks": longest_solution},
            "process_results": _judge,
            "metric_list": [_mean("exact_match")],
        },
    }[benchmark.kind]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": Dataset.from_list(records)},
            "test_split": "test",
            "target_delimiter": benchmark.delimiter,
            "num_fewshot": 0,  # the prompts already contain their examples
            **scoring,
        }
    )


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _judge(record: dict[str, Any], responses: list[str]) -> dict[str, float]:
    """Score 1 if the content of the last \\boxed{} equals the answer after lm-eval's normalization, otherwise 0."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(responses[0])
    try:
        found = None if boxed is None else remove_boxed(boxed)
    except AssertionError:  # "\\fbox{", or an unclosed brace
        found = None
    return {"exact_match": float(found is not None and is_equiv(found, record["answers"][1]))}
