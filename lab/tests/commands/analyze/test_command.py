"""`kvshift analyze` writes what it finds into files, for every kind of folder that it accepts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from kvshift import ShiftOptions
from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.analysis.maps import coefficient_counts
from kvshift_lab.commands.analyze import command as module
from kvshift_lab.commands.analyze.command import AnalyzeConfig, analyze
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.data.tokenizers import train_bpe
from kvshift_lab.run.head_scores import measure_heads
from kvshift_lab.run.loading import load_weights
from kvshift_lab.run.repeat_config import RepeatConfig
from kvshift_lab.run.train_task import TaskTrainConfig, train_task
from kvshift_lab.tasks import InductionConfig
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options

from ...analysis.pages import Page

TEXT = "to be or not to be"
SHAPE = {
    "vocab_size": 277,
    "hidden_size": 20,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 38,
}


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "task"
    train_task(
        TaskTrainConfig(
            out=out,
            task=InductionConfig(length=24, vocab_size=43, lowest_id=17),
            model=ModelConfig(hidden_size=12, num_attention_heads=3, num_hidden_layers=1),
            steps=4,
            batch_size=3,
            eval_every=2,
            eval_rows=5,
            device="cpu",
            progress=False,
        )
    )
    return out


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "shifted"
    torch.manual_seed(0)
    KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**SHAPE)).save_pretrained(folder)
    train_bpe(iter([TEXT, "that is the question"]), 277).save_pretrained(folder)
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the page and its figures, which take seconds to draw."""
    monkeypatch.setattr(module, "write_head_report", lambda out, metrics: out / "analysis.html")


def read(page: Path) -> Page:
    return Page(page.read_text(encoding="utf-8"), between=" ")


def found(out: Path) -> dict:
    return json.loads((out / "heads.json").read_text())


def test_a_run_of_a_task_and_its_page_which_needs_nothing_but_itself(
    task_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = analyze(AnalyzeConfig(run=task_run, rows=3, device="cpu"))
    out = task_run / "analysis"
    assert page == out / "analysis.html"
    stems = ("attention", "coefficients", "head-scores", "learning")
    assert {path.name for path in out.iterdir()} == {
        "analysis.html",
        "attention.safetensors",
        "heads.json",
        *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")),
    }
    measured = measure_heads(
        load_weights(task_run / "model", device="cpu", attn_implementation="eager"),
        RepeatConfig(rows=3, lowest_token=17),
    )
    files = found(out)
    assert files["length"] == measured.length == 12  # two copies fill its 24 positions
    assert [head["moved"] for head in files["heads"]] == [pytest.approx(head.moved) for head in measured.heads]
    assert files["coefficients"] == measured.coefficients
    assert min(files["maps"]["input_ids"]) >= 17  # the task has no lower token ids
    assert files["options"]["lowest_token"] == 17
    best = max(measured.heads, key=lambda head: head.scores["induction"])
    printed = capsys.readouterr().out.splitlines()
    assert f"induction        {best.scores['induction']:.2f}  layer 0, head {best.head}" in printed
    assert printed[-1] == str(page)

    assert files["counts"]["all"] == coefficient_counts(files["coefficients"])
    page = read(page)
    assert len(page.fetched) == 4
    assert page.needs_nothing_but_itself()


@pytest.mark.usefixtures("undrawn")
def test_the_same_call_writes_the_same_bytes(shifted: Path, tmp_path: Path) -> None:
    def written(folder: Path) -> dict[str, bytes]:
        analyze(AnalyzeConfig(run=shifted, out=folder, rows=2, device="cpu"))
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = written(tmp_path)
    assert written(tmp_path) == first
    assert set(first) == {"heads.json", "attention.safetensors"}


@pytest.mark.slow
def test_attention_on_a_text(shifted: Path, tmp_path: Path) -> None:
    page = read(analyze(AnalyzeConfig(run=shifted, out=tmp_path, rows=2, maps=2, text=TEXT, device="cpu")))
    maps = found(tmp_path)["maps"]
    assert "".join(maps["tokens"]) == TEXT
    assert f'On the text "{TEXT}".' in page.text
    assert maps["repeat"] is None
    model = load_weights(shifted, device="cpu", attn_implementation="eager")
    whole = model(torch.tensor([maps["input_ids"]]), output_attentions=True).attentions
    stored = load_file(tmp_path / "attention.safetensors")
    assert set(stored) == {f"{head['layer']}.{head['head']}" for head in maps["heads"]}
    assert 2 <= len(stored) <= 6  # the best two heads for each of three scores, each head once
    for head in maps["heads"]:
        assert torch.equal(stored[f"{head['layer']}.{head['head']}"], whole[head["layer"]][0, head["head"]])
    for name in ("previous token", "duplicate token", "induction"):
        assert sum(head["title"].count(name) for head in maps["heads"]) == 2


def test_a_model_without_shift_has_no_coefficients(tmp_path: Path) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 1})).save_pretrained(tmp_path)
    page = read(analyze(AnalyzeConfig(run=tmp_path, rows=2, maps=1, device="cpu")))
    assert "nothing is shifted" in page.text
    assert len(page.fetched) == 2  # scores and attention
    assert not (tmp_path / "analysis" / "coefficients.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_gpt2_as_it_is(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=26, n_embd=15, n_layer=2, n_head=3)).save_pretrained(tmp_path)
    analyze(AnalyzeConfig(run=tmp_path, rows=2, device="cpu"))
    files = found(tmp_path / "analysis")
    assert (files["length"], files["coefficients"], len(files["heads"])) == (13, [], 6)


@pytest.mark.usefixtures("undrawn")
def test_gpt2_with_shift(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=26, n_embd=15, n_layer=2, n_head=3))
    model = add_kv_shift(model, ShiftOptions(init="uniform"))
    model.save_pretrained(tmp_path)
    analyze(AnalyzeConfig(run=tmp_path, rows=2, device="cpu"))
    files = found(tmp_path / "analysis")
    shifts = [block.attn.shift for block in model.transformer.h]
    for layer, shift in zip(files["coefficients"], shifts, strict=True):
        assert layer == {"alpha": shift.alpha.tolist(), "beta": shift.beta.tolist()}
    for head in files["heads"]:
        now, before = (abs(x) for x in shifts[head["layer"]].beta[head["head"]].tolist())
        places = head["attention"]
        spread = (now * places["earlier+1"] + before * places["earlier+2"]) / (now + before)
        assert head["moved"]["earlier+1"] == pytest.approx(spread, rel=1e-5)


@pytest.mark.usefixtures("undrawn")
def test_the_gpt2_of_the_lab_is_given_tokens_that_its_task_has(tmp_path: Path) -> None:
    options = GPT2Options(width=30, heads=3, layers=1, embedding_rows=41)
    build_model(describe(options, vocab_size=23, length=60), seed=0).save_pretrained(tmp_path)
    analyze(AnalyzeConfig(run=tmp_path, rows=2, device="cpu"))
    files = found(tmp_path / "analysis")
    assert files["length"] == 23
    assert set(files["maps"]["input_ids"]) == set(range(23))
    assert len(files["coefficients"]) == 1


@pytest.mark.usefixtures("undrawn")
def test_a_part_of_a_run_is_given_the_tokens_of_the_run(shifted: Path, task_run: Path, tmp_path: Path) -> None:
    """A model may have more embeddings than its tokenizer has tokens; those were never trained."""
    run = tmp_path / "run"
    shutil.copytree(shifted, run / "model")
    (run / "tokenizer").mkdir()
    for file in (run / "model").glob("token*"):
        file.rename(run / "tokenizer" / file.name)
    model = KVShiftLlamaForCausalLM.from_pretrained(run / "model")
    model.resize_token_embeddings(400)
    model.save_pretrained(run / "model")
    for folder in (run, run / "model"):
        analyze(AnalyzeConfig(run=folder, out=tmp_path / "out", rows=2, device="cpu"))
        assert found(tmp_path / "out")["options"]["highest_token"] == 276
    for folder in (task_run, task_run / "model"):
        analyze(AnalyzeConfig(run=folder, out=tmp_path / "out", rows=2, device="cpu"))
        assert found(tmp_path / "out")["options"]["lowest_token"] == 17


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_not_ended_stands_for_its_checkpoint(
    task_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (checkpoint,) = task_run.glob("checkpoint-*")
    (run / checkpoint.name).symlink_to(checkpoint)
    analyze(AnalyzeConfig(run=run, rows=1, device="cpu"))
    said = f"kvshift analyze: {run} has no final model yet: using {checkpoint.name}\n"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maps": 0}, "maps must be 1 or more, got 0"),
        ({"rows": 0}, "rows must be 1 or more, got 0"),
        ({"length": 99}, "length must be 6 to 19 .*, got 99"),
        ({"text": "x"}, "text must have 2 to 38 tokens, got 1"),
        ({"text": "x " * 50}, "2 to 38 tokens, got 100"),
        ({"device": "abacus"}, "device must be"),
    ],
)
def test_options_that_cannot_be(shifted: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(LabError, match=message):
        analyze(AnalyzeConfig(**{"run": shifted, "out": tmp_path / "out", "device": "cpu", **options}))
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be(shifted: Path, task_run: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="has no tokenizer"):
        analyze(AnalyzeConfig(run=task_run, text=TEXT, device="cpu"))
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"out: .*file cannot be written to"):
        analyze(AnalyzeConfig(run=shifted, out=tmp_path / "file", rows=1, device="cpu"))


@pytest.mark.parametrize("place", ["lm_head.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_non_finite_values_write_no_file(place: str, shifted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shifted, tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights[place] = torch.full_like(weights[place], 3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunFailedError, match="computes numbers that are not finite; nothing was written"):
        analyze(AnalyzeConfig(run=folder, out=tmp_path / "out", rows=2))
    assert not (tmp_path / "out").exists()


def test_layers_with_different_numbers_of_heads(tmp_path: Path):
    sizes = {name: size for name, size in SHAPE.items() if "heads" not in name} | {"hidden_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_swa_attention_heads": 6}
    heads |= {"num_swa_key_value_heads": 3, "sliding_window_layers": [1], "sliding_window": 8}
    config = BaichuanM1Config(**sizes, **heads, rope_theta=1e5, bos_token_id=0, eos_token_id=0)
    BaichuanM1ForCausalLM(config).save_pretrained(tmp_path)
    train_bpe(iter([TEXT]), 277).save_pretrained(tmp_path)
    page = read(analyze(AnalyzeConfig(run=tmp_path, rows=2, maps=1, device="cpu")))
    assert "2 layers, 4 to 6 heads in each; keys and values mixed" in page.text
