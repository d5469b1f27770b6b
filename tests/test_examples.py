"""Everything that users copy runs unchanged: examples, README, tutorial. The README's numbers are the measured ones."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from .tiny_qwen3 import tiny_qwen3

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = tiny_qwen3()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_example(name: str, *args: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "examples" / name, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "examples").glob("*.py"))])
def test_without_arguments_an_example_prints_how_to_call_it(name, monkeypatch, capsys):
    """Run in this process, which has already imported the examples' dependencies."""
    printed = []
    for arguments, code in ([], 2), (["--help"], 0):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "examples" / name), *arguments])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert exit_.value.code == code
        printed.append(capsys.readouterr())
    assert printed[0].err.startswith(f"usage: {name} [-h] ")
    assert printed[0].out == ""
    assert f"python examples/{name} " in printed[1].out


def test_examples_are_short():
    files = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("titan_*/*.py")]
    assert len(files) == 6
    assert {path.name: count for path in files if (count := len(path.read_text().splitlines())) >= 60} == {}


@pytest.mark.slow
def test_trainer_makes_a_model_that_copies(tmp_path):
    run = run_example("trainer.py", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "11 5 42 7 30 11 continues with 5 42 7 30"


@pytest.mark.slow
def test_an_adapter_is_loaded_again(tmp_path):
    pytest.importorskip("peft")
    run = run_example("lora.py", str(tmp_path), "--steps", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"saved in {tmp_path}, and loaded again with the same outputs"
    assert (tmp_path / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_fine_tuning_says_nothing_but_its_losses(tmp_path):
    pytest.importorskip("trl")
    run = run_example("sft.py", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    *losses, last = run.stdout.splitlines()
    assert last == f"saved in {tmp_path}/model, and loaded again: KVShiftLlamaForCausalLM"
    assert len(losses) == 5
    assert all("loss" in line for line in losses)


@pytest.mark.slow
def test_tiny_gpt_learns_induction_in_one_layer():
    run = run_example("tiny_gpt.py", "100")
    assert run.returncode == 0, run.stderr
    *training, answer = run.stdout.splitlines()
    accuracy = {
        (targets, int(step)): float(value)
        for targets, step, value in (
            re.fullmatch(r"shift (\(.*\)): step (\d+), .* accuracy on repeats ([\d.]+)", line).groups()
            for line in training
        )
    }
    assert accuracy["('k', 'v')", 100] >= 0.99
    assert accuracy["()", 100] < 0.5
    assert answer == "11 5 42 7 30 11 continues with 5 42 7 30 11 5 42 7 30"


def test_every_block_of_the_tutorial_runs():
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    namespace = {}
    found = blocks(text, "python")
    assert len(found) == text.count("```") // 2
    torch.manual_seed(0)
    for block in found:
        exec(compile(block, "docs/tutorial.md", "exec"), namespace)
    with pytest.raises(NotImplementedError, match="use_cache=False"):  # however this version names the cache
        namespace["qwen"](namespace["tokens"], use_cache=True)


@pytest.mark.parametrize("number", [0, 1])
def test_each_block_of_the_readme_runs_alone(number, monkeypatch):
    named = []
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda name: named.append(name) or Qwen3ForCausalLM(TINY)
    )
    found = blocks(README, "python")
    assert len(found) == 2
    namespace = {}
    exec(compile(found[number], "README.md", "exec"), namespace)
    if number == 0:
        assert named == ["Qwen/Qwen3-0.6B"]
        assert type(namespace["model"]).__name__ == "KVShiftQwen3ForCausalLM"
        made = namespace["KVShiftLlamaForCausalLM"](namespace["config"])
        shift = sum(value.numel() for name, value in made.named_parameters() if ".shift." in name)
        assert f"of {made.num_parameters():,} parameters, {shift} of them for the shift" in README
    else:
        assert namespace["attended"].shape == (2, 16, 64)


def test_the_comparison_in_the_readme_is_the_one_in_results():
    found = json.loads((ROOT / "results" / "compare" / "summary.json").read_text(encoding="utf-8"))
    loss, perplexity, verdict = found["loss"], found["perplexity"], found["verdicts"]["kv-shift"]
    step, memory, parameters = found["step_time"], found["peak_memory"], found["parameters"]
    ratio, mebi = step["ratios"]["kv-shift"], 2**20
    rows = [
        f"| validation loss, nats per token | {loss['vanilla']['mean']:.4f} | {loss['kv-shift']['mean']:.4f} | "
        f"**{verdict['difference']:.4f}** (95 % interval {verdict['low']:.4f} to {verdict['high']:.4f}) |",
        f"| perplexity | {perplexity['vanilla']['mean']:.2f} | {perplexity['kv-shift']['mean']:.2f} | "
        f"× {perplexity['kv-shift']['mean'] / perplexity['vanilla']['mean']:.3f} |",
        f"| time of a training step | {step['milliseconds']['vanilla']:.1f} ms | "
        f"{step['milliseconds']['kv-shift']:.1f} ms | "
        f"× {ratio['ratio']:.3f} (quartiles {ratio['low']:.3f} to {ratio['high']:.3f}) |",
        f"| peak memory | {memory['vanilla'] / mebi:.0f} MiB | {memory['kv-shift'] / mebi:.0f} MiB | "
        f"× {memory['kv-shift'] / memory['vanilla']:.3f} |",
    ]
    for row in rows:
        assert README.count(row) == 1, row
    assert f"two Llamas of {parameters['vanilla']:,} parameters" in README
    assert f"({verdict['seeds']} seeds, " in README


def test_the_readme_gives_one_time_of_a_step():
    """The README gave 1.02 in one place and 1.012, measured with another model, in another."""
    lines = [line for line in README.splitlines() if "training step" in line and re.search(r"\d\.\d", line)]
    assert [line[:26] for line in lines] == ["| time of a training step "]


def test_the_table_of_the_docs_is_the_one_in_results():
    table = (ROOT / "results" / "compare" / "table.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("|") and "---" not in line]
    docs = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8").replace("KV shift", "KV-shift")
    assert [row for row in rows if row.replace("KV shift", "KV-shift") not in docs] == []
    assert len(rows) > 10


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "results.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_prose_spells_kv_shift_in_one_way(page):
    """KV shift in prose, kv-shift in commands, kvshift for the package; tables and output keep their labels."""
    text = re.sub(
        r"^```.*?^```$|^    .*?$|^\|.*?$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|#\S+", "", text)
    allowed = r"^Validation loss: KV-shift lower by .*$"  # printed by the report, in docs/compare.md
    prose = re.sub(allowed, "", prose, flags=re.MULTILINE)
    assert re.findall(r"\b(?:KV-[Ss]hift\w*|kv shift|Kv.?[Ss]hift|KV Shift|kv-Shift|KVShift\w*)\b", prose) == []
