"""The benchmarks of the paper as tasks of lm-eval: what a model is shown, and which of its answers counts.

Multiple choice in letters, as MMLU asks (Hendrycks et al. 2021), 5-shot:

    The following are multiple choice questions (with answers) about anatomy.

    What is the embryological origin of the hyoid bone?
    A. The first pharyngeal arch
    ...
    D. The second and third pharyngeal arches
    Answer: D

    <four more examples, and the question up to "Answer:"; " A" to " D" are scored>

As text, the cloze format of Waleffe et al. (2024): the question and "Answer:", and the text of each choice is scored. A
prompt that is too long for a model loses whole examples, the first ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple

from kvshift.lab.core.errors import LabError, nearest
from kvshift.lab.evaluate.items import Item, Questions

_LETTERS = "ABCDEFGH"

# Tokens of a solution of MATH at most, or half of what the model is made for.
LONGEST_SOLUTION = 512


class Asked(NamedTuple):
    """A question as it is shown, without examples.

    Attributes:
        prompt: all before the answer.
        answers: to be scored, each behind the benchmark's delimiter; of WinoGrande what stands before `prompt`.
        gold: index of the right one.
    """

    prompt: str
    answers: tuple[str, ...]
    gold: int


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """How the questions of `source` are asked and scored.

    Attributes:
        source: as `read_questions` calls it.
        kind: choice: the answer of the highest log-likelihood; beginning: the beginning after which the end is
            likeliest; word: greedy decoding writes the answer; solution: the answer in the last \\boxed{}.
        ask: shows a question.
        shots: examples before it, of the same subject, in their order.
        metric: of those that lm-eval computes, the one that is reported as the score.
        delimiter: between a question and its answer.
        header: what stands before all examples, from the subject.
    """

    source: str
    kind: Literal["choice", "beginning", "word", "solution"]
    ask: Callable[[Item], Asked]
    shots: int = 0
    metric: str = "acc"
    delimiter: str = " "
    header: Callable[[str], str] = lambda subject: ""


def _plain(item: Item) -> Asked:
    return Asked(item.question, item.answers, item.gold)


def _letters(item: Item, begin: str = "", end: str = "\nAnswer:") -> Asked:
    letters = _LETTERS[: len(item.answers)]
    lines = (f"\n{letter}. {answer}" for letter, answer in zip(letters, item.answers, strict=True))
    return Asked(begin + item.question + "".join(lines) + end, tuple(letters), item.gold)


def _question_letters(item: Item) -> Asked:
    return _letters(item, "Question: ")


def _chinese_letters(item: Item) -> Asked:
    return _letters(item, "题目：", "\n答案是：")


def _gap_letters(item: Item) -> Asked:
    """The sentence with a gap, and what may fill it: the words in which the beginnings differ."""
    one, other = (answer.split(" ") for answer in item.answers)
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)) - 1)
    fills = (" ".join(one[same:]), " ".join(other[same:]))
    return _letters(Item(" ".join([*one[:same], "_", item.question]), fills, item.gold))


def _text(item: Item) -> Asked:
    return Asked(f"{item.question}\nAnswer:", item.answers, item.gold)


def _question_text(item: Item) -> Asked:
    return Asked(f"Question: {item.question}\nAnswer:", item.answers, item.gold)


def _problem(item: Item) -> Asked:
    return Asked(f"Problem:\n{item.question}\n\nSolution:", item.answers, item.gold)


def _about(subject: str) -> str:
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def _about_in_chinese(subject: str) -> str:
    return f"以下是关于{_chinese_name(subject)}的单项选择题，请直接给出正确答案的选项。\n\n"


@cache
def _chinese_name(subject: str) -> str:
    """As the benchmark calls a subject; lm-eval has the names in the files of its own tasks."""
    import yaml

    file = files("lm_eval") / "tasks" / "cmmlu" / f"cmmlu_{subject}.yaml"
    task = yaml.safe_load(file.read_text(encoding="utf-8"))
    return task["description"].split("以下是关于")[1].split("的单项选择题")[0]


_MMLU = Benchmark(source="mmlu", kind="choice", ask=_letters, header=_about)
_CMMLU = Benchmark(source="cmmlu", kind="choice", ask=_chinese_letters, delimiter="", header=_about_in_chinese)

BENCHMARKS = {
    "lambada": Benchmark(source="lambada", kind="word", ask=_plain),
    "winogrande": Benchmark(source="winogrande", kind="beginning", ask=_plain),
    "winogrande_letters": Benchmark(source="winogrande", kind="choice", ask=_gap_letters),
    "hellaswag": Benchmark(source="hellaswag", kind="choice", ask=_plain),
    "arc_easy": Benchmark(source="arc_easy", kind="choice", ask=_question_letters, shots=5),
    "arc_easy_text": Benchmark(source="arc_easy", kind="choice", ask=_question_text),
    "arc_challenge": Benchmark(source="arc_challenge", kind="choice", ask=_question_letters, shots=5),
    "arc_challenge_text": Benchmark(source="arc_challenge", kind="choice", ask=_question_text),
    "cmmlu": Benchmark(**{**vars(_CMMLU), "shots": 5}),
    "cmmlu_zero": _CMMLU,
    "mmlu": Benchmark(**{**vars(_MMLU), "shots": 5}),
    "mmlu_zero": _MMLU,
    "mmlu_cloze": Benchmark(source="mmlu", kind="choice", ask=_text, metric="acc_norm"),
    "math": Benchmark(source="math", kind="solution", ask=_problem, shots=4, metric="exact_match"),
}
PAPER = ("lambada", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "cmmlu", "mmlu", "math")
"""The columns of Table 2, whose plain mean is its average."""

_GROUPS = {"paper": PAPER, "table14": ("mmlu_cloze", "mmlu_zero", "mmlu")}


def select(names: Iterable[str]) -> list[str]:
    """The benchmarks of these names, each once; "paper" and "table14" stand for several.

    Raises:
        LabError: there is no such name.
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
    """Each question as `make_task` takes it.

    "prompt", "answers", "gold" and "subject"; "shots", the examples in the prompt, and "whole", whether the rest fits.

    Where the data holds no examples apart from the questions, the first other questions of the subject serve as such.

    Args:
        fits: whether a prompt and an answer are short enough together.
        limit: of the first so many questions.
    """
    pools: dict[str, list[Item]] = {}
    for item in questions.examples or questions.tests:
        pools.setdefault(item.subject, []).append(item)
    for item in questions.tests[:limit]:
        asked = benchmark.ask(item)
        others = (other for other in pools.get(item.subject, ()) if other != item)
        examples = [_solved(benchmark, other) for other in islice(others, benchmark.shots)]
        prompt, whole = asked.prompt, True
        if benchmark.kind != "beginning":
            head, longest = benchmark.header(item.subject), max(asked.answers, key=len)
            answer = "" if benchmark.kind == "solution" else benchmark.delimiter + longest
            while not (whole := fits(head + "".join(examples) + asked.prompt, answer)) and examples:
                del examples[0]
            prompt = head + "".join(examples) + asked.prompt
        yield {
            "prompt": prompt,
            "answers": list(asked.answers),
            "gold": asked.gold,
            "subject": item.subject,
            "shots": len(examples),
            "whole": whole,
        }


def _solved(benchmark: Benchmark, item: Item) -> str:
    asked = benchmark.ask(item)
    return f"{asked.prompt}{benchmark.delimiter}{asked.answers[asked.gold]}\n\n"


def make_task(name: str, records: list[dict[str, Any]], *, longest_solution: int = LONGEST_SOLUTION) -> Any:
    """A task of lm-eval, of class ConfigurableTask, for `lm_eval.evaluate` and `lm_eval.simple_evaluate`.

    Args:
        records: from `prompts`.
        longest_solution: tokens that a model may write where it has to write a solution.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    benchmark = BENCHMARKS[name]
    how: dict[str, Any] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "answers",
            "doc_to_target": "gold",
            "metric_list": [_mean("acc"), _mean("acc_norm"), _mean("acc_bytes")],
        },
        "beginning": {  # lm-eval takes an index for a text as the sign that the choices are the contexts
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
            "num_fewshot": 0,  # a prompt has its examples already
            **how,
        }
    )


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _judge(record: dict[str, Any], written: list[str]) -> dict[str, float]:
    """Whether what stands in the last \\boxed{} is the answer, after lm-eval's normalization of both."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(written[0])
    try:
        found = None if boxed is None else remove_boxed(boxed)
    except AssertionError:  # "\\fbox{", or a brace that is not closed
        found = None
    return {"exact_match": float(found is not None and is_equiv(found, record["answers"][1]))}
