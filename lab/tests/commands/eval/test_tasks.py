"""`kvshift eval --tasks`: against lm-eval's own command, with other batch sizes, after a kill, and with two models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from kvshift_lab.commands.eval import benchmarks
from kvshift_lab.commands.eval.benchmarks import PAPER, TASKS
from kvshift_lab.commands.eval.command import evaluate
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.core.errors import LabError, RunFailedError, install_command
from kvshift_lab.data.files import file_digest
from kvshift_lab.variants.by_name import find_variant
from kvshift_lab.variants.variant import ModelVariant

from ...generation_cases import SHAPE, save_model, tokenizer
from ...run_cases import disk_of
from .benchmark_cases import write_benchmarks

LONG = {"max_position_embeddings": 256}  # for MATH, whose solutions get half of these tokens


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "shifted", **LONG)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "plain", LlamaForCausalLM, **LONG)
    tokenizer().save_pretrained(folder)
    return folder


def evaluated(folder: Path, mini: Path, output: Path | None = None, *against: Path, **options: Any) -> dict[str, Any]:
    options = {"tasks": ("hellaswag", "mmlu_cloze", "lambada"), **options}
    return evaluate(
        EvalConfig(model=str(folder), data=str(mini), against=tuple(map(str, against)), output=output, **options)
    )


def numbers(found: dict[str, Any], model: int = 0) -> dict[str, Any]:
    return {
        (task, name): value
        for task, values in found["models"][model]["tasks"].items()
        for name, value in values.items()
        if name != "metric"
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ends texts", "puts a token behind every text"),
        ("no special tokens", "has no token that begins or ends a text"),
    ],
)
def test_tokenizers_whose_answers_lm_eval_would_mistake(mini: Path, tmp_path: Path, change: str, message: str):
    words = tokenizer()
    if change == "ends texts":
        words.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    else:
        words = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer)
    words.save_pretrained(save_model(tmp_path / "model", **LONG))
    with pytest.raises(LabError, match=message):
        evaluated(tmp_path / "model", mini)


# lm-eval's own command


@pytest.mark.slow
@pytest.mark.parametrize("model", ["shifted", "plain"])
def test_lm_eval_has_the_same_numbers_of_the_same_folder(model, mini, request, monkeypatch):
    folder = request.getfixturevalue(model)
    names = ("lambada", "winogrande", "hellaswag", "arc_easy", "mmlu", "mmlu_cloze", "cmmlu", "math")
    found = evaluated(folder, mini, tasks=names)["models"][0]["tasks"]
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it would call pip and the drivers
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "softmax_dtype": "float32"},
        tasks=list(names),
        device="cpu",
        gen_kwargs={"max_gen_toks": 128},
        bootstrap_iters=10,
        task_manager=TaskManager(include_path=TASKS, include_defaults=False, metadata={"data": str(mini)}),
    )["results"]
    for name in names:
        ours, theirs = found[name], results[name]
        assert theirs[f"{ours['metric']},none"] == ours["score"]
        assert theirs[f"{ours['metric']}_stderr,none"] == pytest.approx(ours["stderr"], rel=1e-12)
        for other in set(ours) & {"acc", "acc_norm", "acc_bytes"}:
            assert theirs[f"{other},none"] == ours[other]
    assert results["lambada"]["perplexity,none"] == pytest.approx(found["lambada"]["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_the_batch_size_changes_nothing(shifted, mini):
    tasks = ("lambada", "winogrande", "hellaswag", "arc_challenge", "cmmlu", "mmlu", "mmlu_cloze", "math")
    found = [numbers(evaluated(shifted, mini, tasks=tasks, batch_size=size)) for size in (1, 3, 64)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
        assert {name: value for name, value in other.items() if "perplexity" not in name[1]} == {
            name: value for name, value in found[0].items() if "perplexity" not in name[1]
        }


# Resuming


class StoppedError(Exception):
    pass


def test_what_was_answered_is_not_asked_again(shifted, plain, mini, tmp_path, monkeypatch):
    """The evaluation may be stopped anywhere, and may go on with other tasks, limits and models."""
    output = tmp_path / "eval.json"
    answer, asked, most = HFLM._model_call, 0, 3

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        if asked == most:
            raise StoppedError
        asked += 1
        return answer(*args, **kwargs)

    monkeypatch.setattr(HFLM, "_model_call", stopping)
    with pytest.raises(StoppedError):
        evaluated(shifted, mini, output, batch_size=2)
    assert not output.exists()
    asked, most = 0, 1000
    found = evaluated(shifted, mini, output, plain, batch_size=2)
    resumed, asked = asked, 0
    fresh = evaluated(shifted, mini, tmp_path / "fresh.json", plain, batch_size=2)
    assert resumed == asked - 3
    assert found["differences"] == fresh["differences"]
    for model in (0, 1):  # batches of other sizes round differently
        assert numbers(found, model) == pytest.approx(numbers(fresh, model), rel=1e-5)
    asked, most = 0, 0
    assert evaluated(shifted, mini, output, plain)["models"] == found["models"]
    assert evaluated(shifted, mini, output, limit=2)["models"][0]["tasks"]["hellaswag"]["items"] == 2
    with pytest.raises(StoppedError):
        evaluated(shifted, mini, output, tasks=("winogrande",))


def test_other_weights_in_the_same_folder_are_another_model(plain, mini, tmp_path):
    folder = tmp_path / "model"
    output = tmp_path / "eval.json"
    model = AutoModelForCausalLM.from_pretrained(plain)
    tokenizer().save_pretrained(folder)
    found = []
    for scale in (1.0, -1.0):
        model.lm_head.weight.data *= scale
        model.save_pretrained(folder)
        os.utime(folder / "model.safetensors", (1e9, 1e9))  # size and time of the file do not change
        file_digest.cache_clear()  # as in another process
        found.append(numbers(evaluated(folder, mini, output))["lambada", "perplexity"])
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_a_file_of_answers_that_is_none(shifted, mini, tmp_path):
    evaluated(shifted, mini, tmp_path / "eval.json", limit=1)
    (path,) = tmp_path.glob("eval.*.answers")
    path.write_text("not a database")
    with pytest.raises(LabError, match=r"output: .*\.answers must hold answers of this command, as SQLite; remove it"):
        evaluated(shifted, mini, tmp_path / "eval.json")


def test_a_disk_that_fills_up(shifted, mini, tmp_path):
    """What was answered before is kept, and the same command continues."""
    output = tmp_path / "eval.json"
    with disk_of(2**14), pytest.raises(RunFailedError, match=r"output: writing to .*answers failed: "):
        evaluated(shifted, mini, output, tasks=("mmlu", "mmlu_cloze", "hellaswag"))
    assert not output.exists()
    evaluated(shifted, mini, output, tasks=("mmlu", "mmlu_cloze", "hellaswag"))


# Every model that the lab knows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective", "selective-key"])
def test_variants_that_decode_without_a_cache(name, mini, tmp_path):
    variant = find_variant(name)
    assert isinstance(variant, ModelVariant)
    config_class = next(cls for cls in variant.models if cls.__name__ == "KVShiftLlamaConfig")
    torch.manual_seed(0)
    cls = variant.models[config_class]
    shape = SHAPE | LONG | {"vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0}
    cls(cls.config_class(**shape)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    found = evaluated(tmp_path / "model", mini, tasks=("math", "hellaswag"))["models"][0]["tasks"]
    assert found["math"]["items"] == found["hellaswag"]["items"] == 3


# Output and refusals


def test_the_paper_s_tasks_of_two_models(shifted, plain, mini, tmp_path):
    output = tmp_path / "eval.json"
    found = evaluated(shifted, mini, output, plain, tasks=("paper",))
    assert json.loads(output.read_text()) == found
    ours, theirs = (model["tasks"] for model in found["models"])
    mean = found["models"][0]["average"]
    assert mean["score"] == pytest.approx(np.mean([ours[name]["score"] for name in PAPER]), rel=1e-12)
    assert mean["stderr"] == pytest.approx(math.sqrt(sum(ours[name]["stderr"] ** 2 for name in PAPER)) / 8, rel=1e-12)
    (pair,) = found["differences"]
    for name in PAPER:
        assert pair["tasks"][name]["difference"] == pytest.approx(ours[name]["score"] - theirs[name]["score"])
    assert pair["average"]["difference"] == pytest.approx(mean["score"] - found["models"][1]["average"]["score"])
    assert pair["average"]["low"] <= pair["average"]["difference"] <= pair["average"]["high"]
    assert found["chance"]["arc_easy"] == pytest.approx((6 / 4 + 1 / 3) / 7)


def test_prompts_that_are_too_long_are_said(model_folder, mini, capsys):
    evaluated(model_folder, mini, tasks=("mmlu", "lambada"))  # it has 64 positions
    said = capsys.readouterr().err
    assert "kvshift eval: mmlu: to fit into 64 tokens, 4 of 4 prompts lost their beginning" in said
    assert "lambada: to fit" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("mmul",)}, r"tasks: there is no 'mmul'; did you mean mmlu\?"),
        ({"data": "/absent"}, "data must be a folder that exists, got /absent"),
    ],
    ids=str,
)
def test_what_is_refused_before_a_model_is_loaded(options, message, shifted, mini, monkeypatch):
    monkeypatch.setattr(benchmarks, "load_model", lambda *args, **kwargs: pytest.fail("too late"))
    with pytest.raises(LabError, match=message):
        evaluate(EvalConfig(**{"model": str(shifted), "data": str(mini), "tasks": ("hellaswag",)} | options))


def test_a_window_that_is_too_long(shifted, mini):
    with pytest.raises(LabError, match=r"window must be at most 256, the longest context of .*shifted, got 257"):
        evaluated(shifted, mini, window=257)


def test_an_answer_that_is_longer_than_the_window(model_folder, tmp_path):
    path = write_benchmarks(tmp_path) / "lambada" / "lambada_openai.jsonl"
    path.write_text(json.dumps({"context": "to be", "continuation": "x" * 65}))
    with pytest.raises(LabError, match="window must be at least 66, the length of the answer ' xxx"):
        evaluated(model_folder, tmp_path, tasks=("lambada",))


@pytest.mark.slow  # it starts a process
def test_without_lm_eval_it_says_what_to_install(shifted, mini):
    program = """
import sys
sys.modules["lm_eval"] = None
from kvshift_lab.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "eval", str(shifted), "--tasks", "lambada", "--data", str(mini)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "300"})
    assert done.returncode == 2
    assert done.stderr.endswith(f"kvshift eval: tasks: needs the package 'lm_eval': {install_command('eval')}\n")
