"""The questions of the benchmarks, read from files and checked: what the files in `tasks/` refer to.

    DATA/lambada/lambada_openai.jsonl            context, continuation
    DATA/winogrande/winogrande_xl_dev.jsonl      context_options, continuation, gold
    DATA/hellaswag/hellaswag_val_full.txt.bz2    six lines per question: activity and context, label, four endings
    DATA/arc/arc_{easy,challenge}_test.jsonl     query, choices, gold
    DATA/mmlu/{test,dev}/SUBJECT_{test,dev}.csv  question, choice0 to choice3, answer
    DATA/cmmlu/{test,dev}/SUBJECT.csv            Question, A to D, Answer
    DATA/math/math_test.jsonl                    context, answer, chain_of_thought, category

DATA is a folder. Each function returns the split "test" for lm-eval, in the order of the files. "examples" of a
question are up to five questions of its subject: those of "dev", or else the first others of "test".

Raises:
    LabError: A file is missing or broken. The message names file, place, field and what it should be.
"""

from __future__ import annotations

import bz2
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.samplers import ContextSampler

from kvshift_lab.core.errors import LabError

Row = dict[str, Any]
Splits = dict[str, Dataset]

_EXAMPLES = 5


class Examples(ContextSampler):
    """Takes the examples of a question from its field "examples"; lm-eval's own samplers know no subjects."""

    def sample(self, n: int, eval_doc: Row | None = None, df: Any = None, **kwargs: Any) -> list[Row]:
        """Return the first n examples of `eval_doc`, or fewer if it has fewer."""
        assert eval_doc is not None, "fewshot_split must be test_split"
        return eval_doc["examples"][:n]


def lambada(data: str, **_: Any) -> Splits:
    """Return passages without their last word, and the word."""
    path = Path(data, "lambada", "lambada_openai.jsonl")
    return _splits(path, _json_lines(path, context="text", continuation="text"))


def winogrande(data: str, **_: Any) -> Splits:
    """Return two beginnings of a sentence and its end."""
    path = Path(data, "winogrande", "winogrande_xl_dev.jsonl")
    return _splits(path, _json_lines(path, context_options="texts", continuation="text", gold="context_options"))


def hellaswag(data: str, **_: Any) -> Splits:
    """Return the beginning of a description and four endings."""
    path = Path(data, "hellaswag", "hellaswag_val_full.txt.bz2")
    lines = _read(path).removesuffix("\n").split("\n")
    if len(lines) % 6:
        raise LabError(f"data: {path} must have six lines for each question, got {len(lines)} lines")
    rows = []
    for start in range(0, len(lines), 6):
        question, label, *endings = lines[start : start + 6]
        _checked({"question": question, "endings": endings}, f"{path}:{start + 1}", question="text", endings="texts")
        gold = _index(label, "0123", f"{path}:{start + 2}: the label")
        rows.append({"question": question, "choices": endings, "gold": gold})
    return _splits(path, rows)


def arc(data: str, part: str, **_: Any) -> Splits:
    """Return questions of the part "easy" or "challenge", with three or four choices."""
    path = Path(data, "arc", f"arc_{part}_test.jsonl")
    rows = []
    for row in _json_lines(path, query="text", choices="texts", gold="choices"):
        choices = list(dict.fromkeys(row["choices"]))  # questions with three choices repeat one
        gold = choices.index(row["choices"][row["gold"]])
        rows.append({"question": row["query"].removeprefix("Question: "), "choices": choices, "gold": gold})
    return _splits(path, _with_examples(rows, rows))


def mmlu(data: str, **_: Any) -> Splits:
    """Return questions with four choices; "subject" is in words."""
    folder = Path(data, "mmlu")
    columns = ("question", [f"choice{number}" for number in range(4)], "answer", "0123")
    tests, examples = (_tables(folder / split, f"_{split}", *columns) for split in ("test", "dev"))
    for row in (*tests, *examples):
        row["subject"] = row["subject"].replace("_", " ")
    return _splits(folder, _with_examples(tests, examples))


def cmmlu(data: str, **_: Any) -> Splits:
    """Return questions with four choices; "subject" is in Chinese."""
    folder = Path(data, "cmmlu")
    columns = ("Question", list("ABCD"), "Answer", "ABCD")
    tests, examples = (_tables(folder / split, "", *columns) for split in ("test", "dev"))
    names = {subject: _chinese_name(subject, folder) for subject in {row["subject"] for row in (*tests, *examples)}}
    for row in (*tests, *examples):
        row["subject"] = names[row["subject"]]
    return _splits(folder, _with_examples(tests, examples))


def math(data: str, **_: Any) -> Splits:
    """Return problems with their solution and answer."""
    path = Path(data, "math", "math_test.jsonl")
    rows = [
        {**row, "subject": row["category"]}
        for row in _json_lines(path, context="text", chain_of_thought="text", answer="text", category="text")
    ]
    return _splits(path, _with_examples(rows, rows))


def judge_math(question: Row, responses: list[str]) -> dict[str, float]:
    """Score 1 if the content of the last \\boxed{} equals the answer after lm-eval's normalization, otherwise 0."""
    from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(responses[0])
    try:
        found = None if boxed is None else remove_boxed(boxed)
    except AssertionError:  # "\\fbox{", or an unclosed brace
        found = None
    return {"exact_match": float(found is not None and is_equiv(found, question["answer"]))}


def _chinese_name(subject: str, folder: Path) -> str:
    """Return the Chinese name of a subject, from lm-eval's own CMMLU tasks."""
    import yaml

    try:
        text = (files("lm_eval") / "tasks" / "cmmlu" / f"cmmlu_{subject}.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"data: {folder} has a file {subject}.csv, which is no subject of CMMLU") from error
    return yaml.safe_load(text)["description"].split("以下是关于")[1].split("的单项选择题")[0]


def _splits(source: Path, rows: Iterable[Row]) -> Splits:
    rows = list(rows)
    if not rows:
        raise LabError(f"data: {source} has no questions")
    return {"test": Dataset.from_list(rows)}


def _with_examples(rows: list[Row], pool: list[Row]) -> Iterator[Row]:
    by_subject: dict[str, list[Row]] = {}
    for row in pool:
        by_subject.setdefault(row.get("subject", ""), []).append(row)
    for row in rows:
        others = (other for other in by_subject.get(row.get("subject", ""), []) if other != row)
        yield {**row, "examples": list(islice(others, _EXAMPLES))}


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (bz2.decompress(content) if path.suffix == ".bz2" else content).decode()
    except (OSError, ValueError, EOFError) as error:
        raise LabError(f"data: {path} cannot be read: {error}") from error


def _json_lines(path: Path, **fields: str) -> Iterator[Row]:
    for number, line in enumerate(_read(path).removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LabError(f"data: {path}:{number} must be a JSON object: {error}") from error
        yield _checked(row, f"{path}:{number}", **fields)


def _checked(row: Any, place: str, **fields: str) -> Row:
    """Return the named fields of a row.

    Args:
        fields: By name, what each must be: "text", "texts", or the name of a field of texts, of which it is an index.
    """
    if not isinstance(row, Mapping):
        raise LabError(f"data: {place} must be a JSON object, got {row!r:.60}")
    for name, kind in fields.items():
        value = row.get(name)
        if kind == "text":
            right, meaning = _is_text(value), "a text that is not empty"
        elif kind == "texts":
            right = isinstance(value, list) and 2 <= len(value) <= 8 and all(map(_is_text, value))
            meaning = "a list of two to eight texts that are not empty"
        else:
            right = type(value) is int and 0 <= value < len(row[kind])
            meaning = f"an index of {kind}, 0 to {len(row[kind]) - 1}"
        if not right:
            found = f"got {json.dumps(value, ensure_ascii=False):.60}" if name in row else "but is missing"
            raise LabError(f"data: {place}: {name} must be {meaning}, {found}")
    return {name: row[name] for name in fields}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _index(value: str, allowed: str, place: str) -> int:
    if len(value) != 1 or value not in allowed:
        raise LabError(f"data: {place} must be one of {', '.join(allowed)}, got {value!r:.60}")
    return allowed.index(value)


def _tables(folder: Path, ending: str, question: str, choices: list[str], answer: str, answers: str) -> list[Row]:
    """Return the rows of all .csv files of a folder, whose names without `ending` are subjects."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise LabError(f"data: {folder} must have a file SUBJECT{ending}.csv for each subject, got none")
    rows = []
    for path in paths:
        lines = csv.DictReader(io.StringIO(_read(path), newline=""), strict=True)
        try:
            for line in lines:
                place = f"{path}:{lines.line_num}"
                if None in line:
                    raise LabError(f"data: {place} must have as many fields as the header, got more")
                _checked(line, place, **dict.fromkeys((question, *choices, answer), "text"))
                rows.append(
                    {
                        "question": line[question],
                        "choices": [line[choice] for choice in choices],
                        "gold": _index(line[answer], answers, f"{place}: {answer}"),
                        "subject": path.stem.removesuffix(ending),
                    }
                )
        except csv.Error as error:
            raise LabError(f"data: {path} cannot be read after line {lines.line_num}: {error}") from error
    return rows
