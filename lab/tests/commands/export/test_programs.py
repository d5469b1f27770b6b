"""`kvshift export`: programs with only tensors as inputs and outputs generate the same as the model."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift_lab.cli import main
from kvshift_lab.commands.export import programs
from kvshift_lab.commands.export.comparison import compute
from kvshift_lab.commands.export.programs import Program, check_programs, greedy, load_program
from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.run.loading import load_weights
from tests.models.llama.tiny import tiny_model
from tests.models.retrofit.tiny_families import FAMILIES as TINY
from tests.models.retrofit.tiny_families import shifted

from ...generation_cases import save_model, tokenizer

NEW_TOKENS = 9


def batch(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return prompts of these lengths, padded on the left, and their mask."""
    ids = torch.randint(3, 61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return ids, mask


def generated(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )


def as_programs(model: Any) -> tuple[Program, Program]:
    """Return the module that would be traced as both programs, without tracing it."""
    module = programs._NamedTensorModel(model)

    @torch.no_grad()
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return programs.flatten_names(module(**programs.nest_names(inputs)))

    return run, run


@pytest.mark.parametrize("family", TINY)
def test_what_is_traced_generates_what_the_model_does(family: str):
    """Before any export: padding, lengths, and each family's own positions, windows and projections."""
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
    """If the past lost its raw rows, the continuation would differ, and the tests above would show it."""
    model = tiny_model()
    run, _ = as_programs(model)

    def forgetting(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return run({name: torch.zeros_like(x) if "shift_" in name else x for name, x in inputs.items()})

    ids, mask = batch(8, 5)
    assert not torch.equal(greedy(run, forgetting, ids, mask, NEW_TOKENS), generated(model, ids, mask))


@dataclass(frozen=True)
class Exported:
    """A model, the folder that the command exported it to, and the command's messages."""

    model: Any
    folder: Path
    form: str
    prefill: Program
    decode: Program
    said: str


@pytest.fixture(scope="module", params=["onnx", "pt2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A model with QK-norm and a sliding window, exported only once, as that takes up to a minute."""
    form = request.param
    folder = tmp_path_factory.mktemp("export")
    source, out = save_model(folder / "model", qk_norm=True, sliding_window=6), folder / "exported"
    tokenizer().save_pretrained(source)
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as said:
        assert main(["export", str(source), str(out), "--format", form]) == 0
    assert printed.getvalue() == ""
    model = load_weights(source)
    model.generation_config.eos_token_id = None
    prefill, decode = (load_program(out / f"{name}.{form}") for name in ("prefill", "decode"))
    return Exported(model, out, form, prefill, decode, said.getvalue())


@pytest.mark.slow
class TestExported:
    def test_the_command(self, exported: Exported):
        form = exported.form
        assert f"holds a KVShiftLlamaForCausalLM as prefill.{form} and decode.{form}" in exported.said
        assert "on 4 prompts, single and left-padded, the greedy tokens equal those of " in exported.said
        files = {path.name for path in exported.folder.iterdir()}
        assert {f"prefill.{form}", f"decode.{form}", "tokenizer.json", "generation_config.json"} <= files

    def test_twenty_prompts_of_different_lengths(self, exported: Exported):
        """The prompts run one after another in the same two programs, which keep nothing of a prompt."""
        for length in range(1, 21):
            ids, mask = batch(length, seed=length)
            found = greedy(exported.prefill, exported.decode, ids, mask, NEW_TOKENS)
            assert torch.equal(found, generated(exported.model, ids, mask)), length

    @pytest.mark.parametrize("lengths", [(5, 9, 1, 4), (2, 2), (13, 1), (1, 1, 1)])
    def test_batches_padded_on_the_left(self, exported: Exported, lengths: tuple[int, ...]):
        ids, mask = batch(*lengths)
        found = greedy(exported.prefill, exported.decode, ids, mask, NEW_TOKENS)
        assert torch.equal(found, generated(exported.model, ids, mask))
        for row, length in enumerate(lengths):
            alone = ids[row : row + 1, -length:]
            own = generated(exported.model, alone, torch.ones_like(alone))
            assert torch.equal(found[row, -length - NEW_TOKENS :], own[0]), "the sequence alone"

    def test_logits_of_every_position(self, exported: Exported):
        ids, mask = batch(11)
        with torch.no_grad():
            expected = exported.model(ids, attention_mask=mask).logits
        found = exported.prefill({"input_ids": ids, "attention_mask": mask})["logits"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_the_state_of_another_window_is_refused(self, exported: Exported):
        config = deepcopy(exported.model.config)
        config.shift_window = 3
        wider, _ = as_programs(type(exported.model)(config))
        ids, mask = batch(7)
        past = {
            name.replace("present", "past_key_values"): tensor
            for name, tensor in wider({"input_ids": ids, "attention_mask": mask}).items()
            if name != "logits"
        }
        mask = torch.ones(1, 8, dtype=torch.long)
        with pytest.raises(Exception, match=r"shift_(key|value)") as refused:
            exported.decode({"input_ids": ids[:, :1], "attention_mask": mask, **past})
        says = {"onnx": "Got: 2 Expected: 1", "pt2": "size()[1] == 1"}  # the number of rows that it got, or expected
        assert says[exported.form] in str(refused.value)

    def test_a_check_finds_other_weights(self, exported: Exported):
        prompts = [batch(length)[0][0] for length in (5, 8)]
        other = deepcopy(exported.model)
        with torch.no_grad():
            other.model.layers[0].self_attn.v_proj.weight.neg_()
        with pytest.raises(RunFailedError, match=r"in the exported programs, .*prompt 0"):
            check_programs(exported.folder, exported.form, prompts, compute(other, prompts))

    def test_what_the_page_says(self, exported: Exported, monkeypatch: pytest.MonkeyPatch):
        """The loop of the page runs as pasted and gives the tokens of `generate`; a .pt2 file needs only torch."""
        monkeypatch.chdir(exported.folder.parent)
        if exported.form == "onnx":
            the_loop_of_the_page(exported.model)
        else:
            torch_alone(exported.model)

    def test_names(self, exported: Exported):
        if exported.form == "pt2":
            pytest.skip("names of ONNX; those of pt2 are keys of a nested dict, which every test here uses")
        import onnxruntime

        for name, takes_past in (("prefill", False), ("decode", True)):
            path = exported.folder / f"{name}.onnx"
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            parts = [f"{i}.{part}" for i in (0, 1) for part in ("key", "value", "shift_key", "shift_value")]
            past = [f"past_key_values.{part}" for part in parts] * takes_past
            assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", *past]
            assert [one.name for one in session.get_outputs()] == ["logits", *(f"present.{part}" for part in parts)]
            for one in session.get_inputs():
                if "shift_" in one.name:
                    assert one.shape[1:] == [1, 5, 8], "the window is fixed"
                    assert isinstance(one.shape[0], str), "the batch is not"


def the_loop_of_the_page(model: Any) -> None:
    page = (Path(__file__).parents[4] / "docs" / "export.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0], names)
    given = ("input_ids", "attention_mask")
    prompts = {name: torch.from_numpy(names["prompts"][name]).long() for name in given}
    assert (prompts["attention_mask"] == 0).any(), "one is padded"
    expected = model.generate(**prompts, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.from_numpy(names["text"]), expected)


def torch_alone(model: Any) -> None:
    code = (
        "import sys\nsys.modules['kvshift'] = sys.modules['transformers'] = None\nimport torch\n"
        "module = torch.export.load('exported/prefill.pt2').module()\n"
        "ids = torch.arange(3, 10).unsqueeze(0)\n"
        "print(module(input_ids=ids, attention_mask=torch.ones_like(ids))['logits'].argmax(-1).tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with torch.no_grad():
        assert ran.stdout.strip() == str(model(torch.arange(3, 10).unsqueeze(0)).logits.argmax(-1).tolist())
