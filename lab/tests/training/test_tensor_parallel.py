"""Two processes that each hold a part of the model train it like one process that holds all of it."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.commands.generate.command import GenerateConfig, generate
from kvshift_lab.core.errors import LabError
from kvshift_lab.tasks.induction import InductionConfig
from kvshift_lab.training.task_training import TaskTrainConfig, train_task
from kvshift_lab.training.tensor_parallel import check_model, check_tensor_parallel
from kvshift_lab.training.train import train
from kvshift_lab.training.train_config import TrainConfig
from kvshift_lab.variants.building import build_model, llama_config
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import BEFORE_THE_END, LENGTH, copied, metrics, tiny, weights
from ..runs.test_processes import ROOT, arguments, assert_close_results, in_two

EVEN = ["--data.vocab-size", "282"]  # a vocabulary that two processes can divide
SHARED = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
# Sums over heads are taken in another order; measured: 5e-7 for losses near 5, 2e-7 for weights.
CLOSE = {"rtol": 0, "atol": 2e-6}


def in_one(corpus: Path, out: Path, **changes: Any) -> TrainConfig:
    data = {"packing": "documents", "vocab_size": 282}
    return tiny(corpus, out, **{"batch_size": 2, "tokens_per_step": 8 * LENGTH, "data": data, **changes})


def start(corpus: Path, out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = "lab.tests.runs.on_cpu tensor_parallel"
    return in_two(*arguments(corpus, out), *options, program=program, **SHARED, **variables)


def share(corpus: Path, out: Path, *options: str) -> str:
    """Train with two processes what `in_one` trains, and return their messages."""
    done = start(corpus, out, *EVEN, *options)
    assert done.returncode == 0, done.stderr
    held = [(int(part), int(all_)) for part, all_ in re.findall(r"holds (\d+) of (\d+)", done.stderr)]
    assert len(held) == 2
    assert all(part < 0.51 * all_ for part, all_ in held)
    assert done.stderr.count("kvshift train: finished") == 1, done.stderr
    return done.stderr


def assert_same(two: Path, one: Path) -> None:
    assert_close_results(two, one, **CLOSE)
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        assert theirs.pop("kind") == ours.pop("kind")
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    ours, theirs = weights(one), weights(two)
    torch.testing.assert_close({name: theirs[name] for name in ours}, ours, **CLOSE)
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"}  # tied weights, which transformers writes under both names


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    train(in_one(corpus, out))
    return out


@pytest.mark.slow
def test_two_processes_share_a_model_and_one_goes_on(corpus, one, tmp_path):
    two = tmp_path / "two"
    share(corpus, two)
    assert_same(two, one)
    assert not list(two.glob(".model*"))

    texts = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for run, output in zip((one, two), texts, strict=True):
        generate(GenerateConfig(model=str(run), prompt="abc", max_new_tokens=9, device="cpu", output=output))
    continued = [json.loads(path.read_text())["text"] for path in texts]
    assert continued[0] == continued[1]

    resumed = copied(two, tmp_path, without=BEFORE_THE_END)
    train(in_one(corpus, resumed))
    assert_same(resumed, one)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(corpus, one, tmp_path):
    """The processes are killed by SIGKILL while they save, and then started again."""
    resumed = copied(one, tmp_path, without=BEFORE_THE_END)
    assert start(corpus, resumed, *EVEN, KILLED_AT="checkpoint-12").returncode != 0
    assert (resumed / "checkpoint-12" / "optimizer.pt").exists()
    assert "resuming from checkpoint-8" in share(corpus, resumed)
    assert_same(resumed, one)


@pytest.mark.slow
def test_all_that_a_model_may_have(corpus, tmp_path):
    """Queries are shifted as well, with a window of 3 and clamped; also tied embeddings and gradient checkpointing."""
    model = {
        "shift_targets": ("q", "k", "v"),
        "shift_window": 3,
        "shift_constraint": "clamp",
        "tie_word_embeddings": True,
    }
    train(in_one(corpus, tmp_path / "one", model=model, gradient_checkpointing=True))
    shift = "--model.shift-targets q k v --model.shift-window 3 --model.shift-constraint clamp"
    others = "--model.tie-word-embeddings True --gradient-checkpointing"
    share(corpus, tmp_path / "two", *shift.split(), *others.split())
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_from_a_model_with_qk_norm(corpus, tmp_path):
    """Every process has whole norms, which see only the heads of that process; the coefficients are frozen."""
    first, one, two = tmp_path / "first", tmp_path / "one", tmp_path / "two"
    train(in_one(corpus, first, steps=2, model={"qk_norm": True, "shift_constraint": "gate"}))
    train(in_one(corpus, one, init_from=str(first), batch_size=8, model={"freeze_shift": True}))
    share(corpus, two, "--init-from", str(first), "--batch-size", "8", "--model.freeze-shift")
    assert_same(two, one)


def test_the_example_asks_for_it():
    """`accelerate launch` sets the variables in `SHARED`, for 8 processes."""
    example = ROOT / "examples" / "accelerate" / "tensor_parallel.yaml"
    command = f"--config_file {example} --num_processes 8 -m kvshift_lab train"
    launch, _, _ = _validate_launch_command(launch_command_parser().parse_args(command.split()))
    variables = prepare_multi_gpu_env(launch)
    assert {name: variables[name] for name in SHARED} == {**SHARED, "PARALLELISM_CONFIG_TP_SIZE": "8"}


@pytest.fixture
def shared(monkeypatch) -> None:
    """Set the variables of a launcher that has started two processes."""
    for name, value in {**SHARED, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({}, {}, r"parallelism_config_tp_size is 2 \(tensor parallelism\), expected 1 on a CPU"),
        ({"WORLD_SIZE": "4"}, {}, "tp_size is 2 .* expected 4, the number of processes"),
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "tp_size is 2 .* ACCELERATE_USE_FSDP is true"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "tp_size is 2 .* ACCELERATE_USE_DEEPSPEED is true"),
        ({}, {"tune": "shift"}, "tune is 'shift', expected None: .*tensor parallelism"),
        ({}, {"probes": "induction"}, "probes is 'induction', expected None: .*tensor parallelism"),
        ({}, {"compile": True}, "compile is True, expected False: .*tensor parallelism"),
    ],
)
def test_options_that_do_not_go_with_it(shared, tmp_path, settings, changes, said, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LabError, match=said) as caught:
        check_tensor_parallel(tiny(tmp_path, tmp_path, **changes))
    assert caught.value.exit_code == 2


def test_a_task_is_refused(shared, tmp_path):
    with pytest.raises(LabError, match=r"tp_size is 2 .* only `kvshift train` supports it"):
        train_task(TaskTrainConfig(out=tmp_path / "run", task=InductionConfig()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "accumulation", "said"),
    [
        ({"num_key_value_heads": 1}, 1, r"model\.num_key_value_heads must be a multiple of .*tp_size, 2; got 1"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 1, r"num_attention_heads must be a multiple .* got 3"),
        ({"intermediate_size": 33}, 1, r"model\.intermediate_size must be a multiple of .* got 33"),
        ({"vocab_size": 63}, 1, r"model\.vocab_size must be a multiple of .* got 63"),
        ({"qk_norm": True}, 4, r"model\.qk_norm is True and a step has 4 forward passes, expected 1"),
        ({"variant": "smear"}, 1, "expected 1 for a model of model_type .*smear"),
        ({"variant": "mla"}, 1, "expected 1 for a model of model_type .*mla"),
        ({"qk_norm": True}, 1, None),
        ({"variant": "vanilla"}, 4, None),
    ],
)
def test_models_that_cannot_be_shared(shared, fields, accumulation, said):
    options = ModelConfig(**{"hidden_size": 24, "num_attention_heads": 2, "vocab_size": 64, **fields})
    config = llama_config(options, vocab_size=7, sequence_length=9)
    model = build_model(config, seed=0, variant=options.variant)
    if said is None:
        check_model(model, accumulation=accumulation)
    else:
        with pytest.raises(LabError, match=said):
            check_model(model, accumulation=accumulation)


def test_a_retrofitted_model_cannot_be_shared(shared):
    config = Qwen3Config(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    with pytest.raises(LabError, match="expected 1 for a model of model_type kvshift_qwen3: only kvshift_llama"):
        check_model(add_kv_shift(Qwen3ForCausalLM(config)), accumulation=1)


def test_dropout_of_attention_is_refused(shared):
    model = build_model(
        llama_config(ModelConfig(hidden_size=24, num_attention_heads=2), vocab_size=64, sequence_length=9), seed=0
    )
    model.config.attention_dropout = 0.1
    with pytest.raises(LabError, match=r"attention_dropout is 0\.1, expected 0: .* drop the same positions"):
        check_model(model, accumulation=1)
