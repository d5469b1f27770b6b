"""`kvshift check` on the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from kvshift_lab.cli import main

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FEW = ["--properties", "batch", "documents: position_ids", "documents: seq_idx"]
LEAK = "documents: position_ids, cache"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a stock Llama, in bfloat16 and in several shards."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_nothing_wrong_is_0(llama, capsys):
    assert main(["check", str(llama), *FEW]) == 0
    printed = capsys.readouterr()
    assert "checked in float32; the model is saved in bfloat16" in printed.out
    assert "kvshift check: documents: seq_idx: not supported" in printed.err


def test_something_wrong_is_1(llama, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main(["check", str(llama), "--json", "--output", str(out), "--properties", "batch", LEAK]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(out.read_text()) == found
    assert printed.err.splitlines()[-1] == f"kvshift check: 1 of 2 properties are wrong: {LEAK}"
    assert {verdict["property"]: verdict["verdict"] for verdict in found["verdicts"]} == {
        "batch": "right",
        LEAK: "wrong",
    }
    assert found["verdicts"][1]["first"] == {"case": "document 1", "sequence": 0, "position": 4}
    assert {"torch", "transformers", "kvshift", "python"} <= set(found["versions"])
    assert {"command", "commit", "hardware", "notes", "spread", "tolerance"} <= set(found)


def test_the_checkpoint_of_a_run_that_has_not_ended_is_named_once(llama, tmp_path, capsys):
    checkpoint = shutil.copytree(llama, tmp_path / "checkpoint-5")
    (checkpoint / "complete").touch()
    assert main(["check", str(tmp_path), "--properties", "batch"]) == 0
    said = [f"{tmp_path} has no final model yet: using checkpoint-5", "batch: right"]
    assert capsys.readouterr().err.splitlines() == [f"kvshift check: {line}" for line in said]


def test_the_attention_implementation_and_dtype_reach_the_model(llama, capsys):
    options = ["--attn-implementation", "eager", "--dtype", "float64", "--properties", "batch"]
    assert main(["check", str(llama), *options]) == 0
    assert "float64 on cpu, eager" in capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()[-1].removeprefix("kvshift check: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "5"], "length must be 12 or more, got 5"),
        (["--properties", "causalty"], "no property 'causalty'; did you mean causality?"),
        (["--output", "no/x"], "output must be a file in a folder"),
        (["--attn-implementation", "fast"], "fast"),
    ],
)
def test_bad_options_are_named(options, message, llama, capsys):
    assert message in refused(capsys, str(llama), *options)


def test_a_model_of_another_kind_is_named(tmp_path, capsys):
    t5 = T5Config(vocab_size=61, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "T5Config" in refused(capsys, str(tmp_path / "t5"))


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids, **options)
        output.logits = output.logits + output.logits.mean(0, keepdim=True)  # sequences of a batch meet
        return output
"""


@pytest.mark.slow
def test_remote_code(llama, tmp_path, capsys):
    folder = tmp_path / "remote"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    (folder / "own.py").write_text(REMOTE)
    assert "custom code" in refused(capsys, str(folder))
    assert main(["check", str(folder), "--trust-remote-code", "--properties", "batch", "causality"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "kvshift check: 1 of 2 properties are wrong: batch"


def test_the_program_of_the_page_runs(capsys):
    page = (Path(__file__).parents[4] / "docs/check.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    error, tolerance = map(float, capsys.readouterr().out.split())
    assert error < tolerance
