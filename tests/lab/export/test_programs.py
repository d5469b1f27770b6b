"""`kvshift export`: programs of tensors alone, which generate what the model generates."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.cli import main
from kvshift.lab.core.errors import LabError, RunFailedError
from kvshift.lab.export import programs
from kvshift.lab.export.export_config import ExportOptions
from kvshift.lab.export.exporting import export
from kvshift.lab.export.programs import Program, check_programs, greedy, load_program, write_programs
from kvshift.lab.export.remote_code import compute
from kvshift.lab.runs.loading import load_weights

from ...models.llama.tiny import tiny_model
from ...models.retrofit.tiny_families import FAMILIES as TINY
from ...models.retrofit.tiny_families import shifted
from ..generation_cases import save_model, tokenizer

NEW_TOKENS = 9


def batch(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths, padded on the left, and their mask."""
    ids = torch.randint(3, 61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return ids, mask


def generated(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )


def as_programs(model: Any) -> tuple[Program, Program]:
    """What is traced, not traced."""
    module = programs._Tensors(model)

    @torch.no_grad()
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return programs.flat(module(**programs.nested(inputs)))

    return run, run


@pytest.mark.parametrize("family", TINY)
def test_what_is_traced_generates_what_the_model_does(family: str):
    """Before any exporter: padding, lengths, and for every family its own positions, windows and projections."""
    model = shifted(family, torch.float64)
    for lengths in ((7,), (1,), (3, 11, 1)):
        ids, mask = batch(*lengths)
        found = greedy(*as_programs(model), ids, mask, NEW_TOKENS)
        assert torch.equal(found, generated(model, ids, mask)), lengths


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"shift_targets": ("q", "k", "v"), "shift_window": 3}, ["shift_key", "shift_value", "shift_query"]),
        ({"shift_targets": ("v",)}, ["shift_key", "shift_value"]),
        ({"shift_targets": ()}, []),
        ({"sliding_window": 4}, ["shift_key", "shift_value"]),
    ],
)  # fmt: skip
def test_what_is_carried(options: dict[str, Any], names: list[str]):
    model = tiny_model(**options)
    ids, mask = batch(4, 6)
    run, _ = as_programs(model)
    outputs = run({"input_ids": ids, "attention_mask": mask})
    assert list(outputs) == ["logits", *(f"present.{i}.{name}" for i in (0, 1) for name in ["key", "value", *names])]
    rows = model.config.shift_window - 1
    for name, tensor in outputs.items():
        if "shift_" in name:
            assert tensor.shape == (2, rows, 6 if name.endswith("query") else 3, 10)
    assert torch.equal(greedy(run, run, ids, mask, NEW_TOKENS), generated(model, ids, mask))


def test_rows_decide():
    """A past without its raw rows would continue otherwise: the tests above would see it."""
    model = tiny_model()
    run, _ = as_programs(model)

    def forgetting(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return run({name: torch.zeros_like(x) if "shift_" in name else x for name, x in inputs.items()})

    ids, mask = batch(8, 5)
    assert not torch.equal(greedy(run, forgetting, ids, mask, NEW_TOKENS), generated(model, ids, mask))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    with pytest.raises(LabError, match=r"needs the packages onnx, onnxscript, onnxruntime: pip install "):
        export(ExportOptions(model="anything", out=tmp_path / "out"))


@pytest.fixture(scope="module", params=["onnx", "pt2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    """A model with QK-norm and a sliding window, and the folder of its programs."""
    form = request.param
    model = tiny_model(qk_norm=True, sliding_window=6)
    folder = tmp_path_factory.mktemp("exported")
    write_programs(model, folder, form)
    return model, folder, form


def load(folder: Path, form: str) -> tuple[Program, Program]:
    return load_program(folder / f"prefill.{form}"), load_program(folder / f"decode.{form}")


@pytest.mark.slow
class TestExported:
    def test_twenty_prompts_of_different_lengths(self, exported: Any):
        """One after another in the same two programs: nothing of a prompt is left in them."""
        model, folder, form = exported
        prefill, decode = load(folder, form)
        for length in range(1, 21):
            ids, mask = batch(length, seed=length)
            assert torch.equal(greedy(prefill, decode, ids, mask, NEW_TOKENS), generated(model, ids, mask)), length

    @pytest.mark.parametrize("lengths", [(5, 9, 1, 4), (2, 2), (13, 1), (1, 1, 1)])
    def test_batches_padded_on_the_left(self, exported: Any, lengths: tuple[int, ...]):
        model, folder, form = exported
        prefill, decode = load(folder, form)
        ids, mask = batch(*lengths)
        found = greedy(prefill, decode, ids, mask, NEW_TOKENS)
        assert torch.equal(found, generated(model, ids, mask))
        for row, length in enumerate(lengths):
            alone = ids[row : row + 1, -length:]
            own = generated(model, alone, torch.ones_like(alone))
            assert torch.equal(found[row, -length - NEW_TOKENS :], own[0]), "the sequence alone"

    def test_logits_of_every_position(self, exported: Any):
        model, folder, form = exported
        prefill, _ = load(folder, form)
        ids, mask = batch(11)
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
        found = prefill({"input_ids": ids, "attention_mask": mask})["logits"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_the_state_of_another_window_is_refused(self, exported: Any):
        _, folder, form = exported
        _, decode = load(folder, form)
        wider, _ = as_programs(tiny_model(shift_window=3))
        ids, mask = batch(7)
        past = {
            name.replace("present", "past_key_values"): tensor
            for name, tensor in wider({"input_ids": ids, "attention_mask": mask}).items()
            if name != "logits"
        }
        mask = torch.ones(1, 8, dtype=torch.long)
        with pytest.raises(Exception, match=r"shift_(key|value)") as refused:
            decode({"input_ids": ids[:, :1], "attention_mask": mask, **past})
        says = {"onnx": "Got: 2 Expected: 1", "pt2": "size()[1] == 1"}  # the rows that it has, or that it expects
        assert says[form] in str(refused.value)

    def test_a_check_finds_other_weights(self, exported: Any):
        _, folder, form = exported
        prompts = [batch(length)[0][0] for length in (5, 8)]
        with pytest.raises(RunFailedError, match=r"by the programs, .*prompt 0"):
            check_programs(folder, form, prompts, compute(tiny_model(seed=1, qk_norm=True), prompts))

    def test_names(self, exported: Any):
        _, folder, form = exported
        if form == "pt2":
            pytest.skip("names of ONNX; those of pt2 are keys of a nested dict, which every test here uses")
        import onnxruntime

        for name, takes_past in (("prefill", False), ("decode", True)):
            session = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
            parts = [f"{i}.{part}" for i in (0, 1) for part in ("key", "value", "shift_key", "shift_value")]
            past = [f"past_key_values.{part}" for part in parts] * takes_past
            assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", *past]
            assert [one.name for one in session.get_outputs()] == ["logits", *(f"present.{part}" for part in parts)]
            for one in session.get_inputs():
                if "shift_" in one.name:
                    assert one.shape[1:] == [1, 3, 10], "the window is fixed"
                    assert isinstance(one.shape[0], str), "the batch is not"


@pytest.mark.slow
def test_pt2_needs_torch_alone(tmp_path: Path):
    model = tiny_model(num_hidden_layers=1)
    write_programs(model, tmp_path, "pt2")
    code = (
        "import sys\nsys.modules['kvshift'] = sys.modules['transformers'] = None\nimport torch\n"
        f"module = torch.export.load({str(tmp_path / 'prefill.pt2')!r}).module()\n"
        "ids = torch.arange(3, 10).unsqueeze(0)\n"
        "print(module(input_ids=ids, attention_mask=torch.ones_like(ids))['logits'].argmax(-1).tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ids = torch.arange(3, 10).unsqueeze(0)
    with torch.no_grad():
        assert ran.stdout.strip() == str(model(ids).logits.argmax(-1).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_the_command(form: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    folder = save_model(tmp_path / "model", num_hidden_layers=1)
    tokenizer().save_pretrained(folder)
    out = tmp_path / "exported"
    assert main(["export", str(folder), str(out), "--format", form]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"holds a KVShiftLlamaForCausalLM as prefill.{form} and decode.{form}" in captured.err
    assert "on 4 prompts, alone and padded on the left, they give the tokens" in captured.err
    files = {path.name for path in out.iterdir()}
    assert {f"prefill.{form}", f"decode.{form}", "tokenizer.json", "generation_config.json"} <= files
    if form == "onnx":
        monkeypatch.chdir(tmp_path)
        the_loop_of_the_page(load_weights(folder))


def the_loop_of_the_page(model: Any) -> None:
    """It runs as pasted, and gives the tokens that `generate` gives."""
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0], names)
    given = ("input_ids", "attention_mask")
    prompts = {name: torch.from_numpy(names["prompts"][name]).long() for name in given}
    assert (prompts["attention_mask"] == 0).any(), "one is padded"
    model.generation_config.eos_token_id = None
    expected = model.generate(**prompts, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.from_numpy(names["text"]), expected)


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save_model(tmp_path / "model")
    tokenizer().save_pretrained(folder)
    monkeypatch.setattr("kvshift.lab.export.exporting.write_programs", lambda *_: None)
    with pytest.raises(RunFailedError, match="the programs do not run"):
        export(ExportOptions(model=str(folder), out=tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
