"""`kvshift export --remote-code`: a folder for the hub whose code imports the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.cli import main
from kvshift_lab.commands.export.comparison import compute
from kvshift_lab.commands.export.remote_code import FILE, check_folder, require_known, write_code
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.run.loading import load_weights
from kvshift_lab.variants.by_name import find_variant
from tests.models.llama.tiny import SIZES
from tests.models.retrofit.tiny_families import FAMILIES as TINY
from tests.models.retrofit.tiny_families import shifted

from ...generation_cases import save_model, tokenizer


def prompts(vocabulary: int = 61) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocabulary, (length,), generator=generator) for length in (7, 1, 12, 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of the package, with every target shifted by a window of 3, and QK-norm."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    options: dict[str, Any] = {"shift_targets": ("q", "k", "v"), "shift_window": 3, "qk_norm": True}
    save_model(folder, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, **options)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same model with its code."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    model = KVShiftLlamaForCausalLM.from_pretrained(saved)
    model.save_pretrained(folder)
    write_code(model, folder)
    return folder


@pytest.mark.parametrize("family", [name for name in TINY if "," not in name])
def test_every_class_that_config_json_names_loads(family: str, tmp_path: Path):
    model = shifted(family).float()
    model.save_pretrained(tmp_path)
    write_code(model, tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
    for auto, name in auto_map.items():
        made = get_class_from_dynamic_module(name, str(tmp_path))
        assert made.__module__.startswith("transformers_modules.")
        if auto == "AutoModelForCausalLM":
            found = made.from_pretrained(tmp_path).eval()
            for what, expected in compute(model.eval(), prompts()).items():
                assert torch.equal(compute(found, prompts())[what], expected), what


def test_it_computes_the_same_in_another_process(saved: Path, exported: Path):
    model = KVShiftLlamaForCausalLM.from_pretrained(saved).eval()
    assert check_folder(exported, prompts(277), compute(model, prompts(277))) == 0.0


def test_a_folder_that_computes_something_else_is_found(saved: Path, exported: Path):
    model = KVShiftLlamaForCausalLM.from_pretrained(saved).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.shift.alpha.neg_()
    with pytest.raises(RunFailedError, match=r"from the folder, the (continuation|logits) of prompt 0 differed"):
        check_folder(exported, prompts(277), compute(model, prompts(277)))


def in_a_process(code: str, *arguments: Path, modules: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_saved_copy_keeps_the_code(exported: Path, tmp_path: Path):
    code = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])"
    )
    ran = in_a_process(code, exported, tmp_path / "copy", modules=tmp_path / "modules")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "copy" / FILE).read_text() == (exported / FILE).read_text()
    for folder in (exported, tmp_path / "copy"):  # where the package is imported, its own classes load the folder
        assert type(load_weights(folder)) is KVShiftLlamaForCausalLM


def test_without_the_package_transformers_names_it(exported: Path, tmp_path: Path):
    code = (
        "import importlib, sys\n"
        "real = importlib.import_module\n"
        "def without(name, *args):\n"
        "    if name.split('.')[0] == 'kvshift': raise ImportError(f'No module named {name!r}')\n"
        "    return real(name, *args)\n"
        "importlib.import_module = without\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    ran = in_a_process(code, exported, modules=tmp_path)
    assert ran.returncode == 1
    assert "requires the following packages that were not found in your environment: kvshift" in ran.stderr


def test_a_model_of_no_known_family_is_refused():
    named = "a LlamaForCausalLM cannot be exported; these can: KVShiftLlamaForCausalLM, KVShiftGPT2LMHeadModel"
    with pytest.raises(LabError, match=named):
        require_known(LlamaForCausalLM(LlamaConfig(**SIZES)))
    smear = find_variant("smear").models[KVShiftLlamaConfig]
    with pytest.raises(LabError, match=f"a {smear.__name__} cannot be exported"):
        require_known(smear(smear.config_class(**SIZES)))


@pytest.mark.slow
def test_the_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "deep" / "out"
    assert main(["export", str(saved), str(out), "--remote-code"]) == 0
    said = capsys.readouterr().err
    assert f"holds a KVShiftLlamaForCausalLM and {FILE}, which imports its classes from kvshift" in said
    assert "on 4 prompts, single, left-padded and packed, its logits equal those of" in said
    assert list(out.parent.iterdir()) == [out]
    assert {FILE, "config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in out.iterdir()}


def test_a_last_token_does_not_end_the_comparison(saved: Path):
    """The model's generation config declares every token of one answer an end token."""
    model = KVShiftLlamaForCausalLM.from_pretrained(saved).eval()
    expected = compute(model, prompts(277))
    own = model.generation_config
    own.eos_token_id = expected["0 tokens"][0, -8:].tolist()
    again = compute(model, prompts(277))
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    assert expected["0 tokens"].shape[1] == 7 + 8
    assert model.generation_config is own
