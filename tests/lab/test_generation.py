"""`kvshift generate`: every row as it would be alone, nothing lost or repeated, each fault named."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvshift.cli import main
from kvshift.lab import loading
from kvshift.lab.data.tokenizers import train_bpe
from kvshift.lab.errors import LabError
from kvshift.lab.generation import GenerateConfig, encode, generate
from kvshift.lab.loading import load_model, locate
from kvshift.lab.prompts import read_prompts
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

TEXT = ["to be or not to be, that is the question: whether 'tis nobler in the mind", "naïve café — 東京 🙂"]
PROMPTS = ["to be", "or not to be, that is the question: whether", "t", "café — 東京 🙂 the mind"]
SHAPE: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 64,
}


def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(iter(TEXT), 277)


def save_model(folder: Path, cls: type = KVShiftLlamaForCausalLM, **options: Any) -> Path:
    """A model whose weights are large enough to make every text another."""
    torch.manual_seed(0)
    config_class = KVShiftLlamaConfig if cls is KVShiftLlamaForCausalLM else LlamaConfig
    model = cls(config_class(**{**SHAPE, "vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".shift." not in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "model")
    tokenizer().save_pretrained(folder)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_prompts(folder: Path, prompts: list[str] = PROMPTS) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def batch_config(model_folder: Path, tmp_path: Path, **options: Any) -> GenerateConfig:
    defaults = {"max_new_tokens": 11, "temperature": 0.0, "batch_size": 3}
    prompts = options.pop("prompts", None) or write_prompts(tmp_path)
    output = tmp_path / "answers.jsonl"
    return GenerateConfig(model=str(model_folder), prompts=prompts, output=output, **{**defaults, **options})


# What is generated


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "samples": 2, "temperature": 0.7},
        {"repetition_penalty": 1.7},
        {"prompt_lookup": 3},
    ],
    ids=["greedy", "beams", "sampled beams", "repetition penalty", "prompt lookup"],
)
def test_rows_of_a_batch_are_as_alone(model_folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = batch_config(model_folder, tmp_path, **options)
    if "samples" in options:  # draws differ from batch to batch; what is drawn must at least belong to its prompt
        generate(config)
        found = [(line["index"], line["sample"], line["prompt"]) for line in lines(config.output)]
        assert found == [(n, sample, prompt) for n, prompt in enumerate(PROMPTS) for sample in (0, 1)]
        return
    generate(config)
    together = lines(config.output)
    for number, prompt in enumerate(PROMPTS):
        alone = tmp_path / f"{number}"
        alone.mkdir()
        one = batch_config(model_folder, alone, **options, prompts=write_prompts(alone, [prompt]))
        generate(one)
        (line,) = lines(one.output)
        assert together[number] == line | {"index": number, "settings": together[number]["settings"]}
        assert line["prompt"] == prompt
    assert len({line["text"] for line in together}) == len(PROMPTS)


def test_greedy_is_what_transformers_generates(model_folder: Path, tmp_path: Path) -> None:
    config = batch_config(model_folder, tmp_path)
    generate(config)
    model = KVShiftLlamaForCausalLM.from_pretrained(model_folder).eval()
    for line in lines(config.output):
        ids = torch.tensor([tokenizer()(line["prompt"])["input_ids"]])
        new = model.generate(ids, max_new_tokens=11, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert line["text"] == tokenizer().decode(new, skip_special_tokens=True)
        assert (line["tokens"], line["finish"]) == (len(new), "end" if new[-1] == 0 else "length")


def test_prompt_lookup_gives_the_greedy_text(model_folder: Path, tmp_path: Path) -> None:
    plain = batch_config(model_folder, tmp_path)
    drafted = dataclasses.replace(plain, prompt_lookup=2, output=tmp_path / "drafted.jsonl")
    generate(plain)
    generate(drafted)
    assert [line["text"] for line in lines(plain.output)] == [line["text"] for line in lines(drafted.output)]


def test_a_text_that_the_model_ends(model_folder: Path, tmp_path: Path) -> None:
    """The model below says nothing but the token that ends a text, after a first other one."""
    folder = shutil.copytree(model_folder, tmp_path / "ends")
    model = KVShiftLlamaForCausalLM.from_pretrained(folder)
    generated = model.generate(torch.tensor([tokenizer()("to be")["input_ids"]]), max_new_tokens=4, do_sample=False)
    third = int(generated[0, -2])
    model.config.eos_token_id = model.generation_config.eos_token_id = third
    model.save_pretrained(folder)
    config = batch_config(folder, tmp_path, max_new_tokens=9)
    generate(config)
    first, *others = lines(config.output)
    assert (first["tokens"], first["finish"]) == (3, "end")
    assert first["text"] == tokenizer().decode(generated[0, -4:-2])
    assert any(line["finish"] == "length" and line["tokens"] == 9 for line in others)


def test_draws_follow_the_seed(model_folder: Path, tmp_path: Path) -> None:
    texts = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = batch_config(model_folder, tmp_path, temperature=1.0, samples=2, seed=seed)
        config = dataclasses.replace(config, output=tmp_path / name)
        before = torch.get_rng_state()
        generate(config)
        assert torch.equal(torch.get_rng_state(), before)  # the caller's own draws are left alone
        texts[name] = [line["text"] for line in lines(config.output)]
    assert texts["a"] == texts["b"]
    assert all(one != other for one, other in zip(texts["a"], texts["c"], strict=True))
    assert len(set(texts["a"])) == 2 * len(PROMPTS)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_each_sampling_option_reaches_the_model(model_folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """At its extreme each leaves the likeliest token alone."""
    drawn = batch_config(model_folder, tmp_path, **{"temperature": 1.0, **options})
    greedy = dataclasses.replace(batch_config(model_folder, tmp_path), output=tmp_path / "greedy.jsonl")
    generate(drawn)
    generate(greedy)
    assert [line["text"] for line in lines(drawn.output)] == [line["text"] for line in lines(greedy.output)]


def test_all_tokens_are_drawn_from_unless_told_otherwise(model_folder: Path, tmp_path: Path) -> None:
    """Transformers' own default is the 50 likeliest; at a high temperature more come as the first."""
    config = batch_config(model_folder, tmp_path, temperature=1e4, samples=400, max_new_tokens=1)
    generate(config)
    assert len({line["text"] for line in lines(config.output) if line["index"] == 0}) > 70


def test_no_two_batches_draw_the_same_numbers(model_folder: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, ["to be"] * 4)
    generate(config := batch_config(model_folder, tmp_path, prompts=prompts, temperature=1.0, batch_size=1))
    assert len({line["text"] for line in lines(config.output)}) == 4


def test_text_begins_as_it_does_behind_its_prompt(tmp_path: Path) -> None:
    """Tokenizers with a sign for the space drop it where a text begins; a continuation begins no text."""
    words = {"<end>": 0} | {f"▁{word}": number for number, word in enumerate(["to", "be", "or", "not", "that"], 1)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    folder = save_model(tmp_path / "model", vocab_size=len(words))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    generate(config := batch_config(folder, tmp_path, prompts=write_prompts(tmp_path, ["to be", "or", "not to"])))
    texts = [line["text"] for line in lines(config.output) if line["tokens"] > 1]
    assert texts
    assert all(text.startswith(" ") and text[1] != " " for text in texts)


def test_options_of_the_models_own_do_not_interfere(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "own")
    own = json.loads((folder / "generation_config.json").read_text())
    own |= {
        "do_sample": True,
        "temperature": 5.0,
        "repetition_penalty": 9.0,
        "max_new_tokens": 2,
        "no_repeat_ngram_size": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(own))
    configs = [batch_config(model_folder, tmp_path), batch_config(folder, tmp_path)]
    configs[1] = dataclasses.replace(configs[1], output=tmp_path / "own.jsonl")
    for config in configs:
        generate(config)
    assert [line["text"] for line in lines(configs[0].output)] == [line["text"] for line in lines(configs[1].output)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_other_models_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "llama":
        save_model(folder, LlamaForCausalLM)
    else:
        GPT2LMHeadModel(GPT2Config(vocab_size=277, n_positions=64, n_embd=20, n_layer=1, n_head=2)).save_pretrained(
            folder
        )
    tokenizer().save_pretrained(folder)
    config = batch_config(folder, tmp_path)
    generate(config)
    assert [line["prompt"] for line in lines(config.output)] == PROMPTS


def test_a_bfloat16_model_keeps_its_coefficients(model_folder: Path) -> None:
    model, *_ = load_model(str(model_folder), dtype="bfloat16", say=print)
    dtypes = {".shift." in name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


# What is printed


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", ["to be, or", "東京 🙂"])
def test_text_is_printed_as_it_comes(
    model_folder: Path, capsys: pytest.CaptureFixture[str], prompt: str, echo: bool
) -> None:
    arguments = ["generate", str(model_folder), "--prompt", prompt, "--max-new-tokens", "9", "--temperature", "0"]
    assert main([*arguments, "--echo" if echo else "--no-echo"]) == 0
    printed = capsys.readouterr()
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    model = KVShiftLlamaForCausalLM.from_pretrained(model_folder)
    new = model.generate(ids, max_new_tokens=9, do_sample=False)
    expected = tokenizer().decode(new[0] if echo else new[0, ids.shape[1] :], skip_special_tokens=True)
    assert printed.out == expected + "\n"
    assert printed.err == ""


def test_text_is_printed_before_the_last_token(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    forward = KVShiftLlamaForCausalLM.forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(capsys.readouterr().out))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(KVShiftLlamaForCausalLM, "forward", spy)
    # Words are printed when a space follows; drawn from all tokens alike, a few do.
    generate(GenerateConfig(model=str(model_folder), prompt="to be", max_new_tokens=50, temperature=1e4))
    assert seen[0] > 0  # of the prompt, before the first token
    assert any(n > 0 for n in seen[1:-1])


def test_samples_are_printed_one_below_the_other(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = GenerateConfig(model=str(model_folder), prompt="to be", max_new_tokens=5, samples=2, echo=False)
    generate(config)
    printed = capsys.readouterr().out
    assert printed.startswith("--- 1 of 2\n")
    first, second = printed.removeprefix("--- 1 of 2\n").split("--- 2 of 2\n")
    assert first != second
    generate(dataclasses.replace(config, num_beams=2))
    assert capsys.readouterr().out.count("--- ") == 2


def test_prompt_from_stdin(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("to be\nor\n\n"))
    generate(GenerateConfig(model=str(model_folder), prompt="-", max_new_tokens=3))
    assert capsys.readouterr().out.startswith("to be\nor\n")


def test_json_lines_on_stdout(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = batch_config(model_folder, tmp_path)
    generate(dataclasses.replace(config, output=None))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    generate(config)
    assert printed == lines(config.output)


def test_one_prompt_into_a_file(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "down" / "answer.jsonl"
    generate(GenerateConfig(model=str(model_folder), prompt="to be", output=output, max_new_tokens=3))
    assert [line["prompt"] for line in lines(output)] == ["to be"]


def test_an_empty_prompt_begins_a_text(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "answer.jsonl"
    generate(GenerateConfig(model=str(model_folder), prompt="", output=output, max_new_tokens=7, temperature=0))
    model = KVShiftLlamaForCausalLM.from_pretrained(model_folder)
    expected = model.generate(torch.tensor([[0]]), max_new_tokens=7, do_sample=False)
    assert lines(output)[0]["text"] == tokenizer().decode(expected[0], skip_special_tokens=True)


def test_an_empty_prompt_without_such_a_token_is_an_error() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    bare.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert encode(bare, "a a") == [0, 0]
    with pytest.raises(LabError, match=r"prompts\.txt:3 is empty, and the tokenizer has no token that begins"):
        encode(bare, "", "prompts.txt:3")


# What was stopped goes on


@pytest.fixture
def finished(model_folder: Path, tmp_path: Path) -> tuple[GenerateConfig, bytes]:
    config = batch_config(model_folder, tmp_path, temperature=0.9, samples=2)
    generate(config)
    return config, config.output.read_bytes()


def cuts(content: bytes) -> Iterator[int]:
    """After every line, and within every line."""
    end = 0
    yield 0
    for line in content.splitlines(keepends=True):
        yield end + len(line) // 2
        end += len(line)
        yield end - 1
        yield end


def test_a_file_that_was_cut_anywhere_ends_as_if_it_had_not_been(finished: tuple[GenerateConfig, bytes]) -> None:
    config, content = finished
    for cut in cuts(content):
        config.output.write_bytes(content[:cut])
        generate(config)
        assert config.output.read_bytes() == content, cut


def test_what_is_there_is_not_made_again(
    finished: tuple[GenerateConfig, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, content = finished

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished file needs no model")

    monkeypatch.setattr(KVShiftLlamaForCausalLM, "generate", never)
    generate(config)
    assert config.output.read_bytes() == content
    assert "has 8 of 8 lines already" in capsys.readouterr().err


@pytest.mark.slow
def test_kill_and_rerun(model_folder: Path, tmp_path: Path) -> None:
    """A real kill -9 while lines are written."""
    prompts = write_prompts(tmp_path, [f"{prompt} {n}" for n in range(10) for prompt in PROMPTS])
    config = batch_config(model_folder, tmp_path, prompts=prompts, max_new_tokens=30, temperature=0.9)
    command = [sys.executable, "-m", "kvshift", "generate", config.model, "--prompts", str(prompts)]
    command += ["--output", str(config.output), "--max-new-tokens", "30", "--temperature", "0.9", "--batch-size", "3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (config.output.exists() and config.output.stat().st_size):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    partial = config.output.read_bytes()
    assert 0 < partial.count(b"\n") < 40
    generate(config)
    whole = config.output.read_bytes()
    assert whole.startswith(partial[: partial.rfind(b"\n") + 1])
    fresh = dataclasses.replace(config, output=tmp_path / "fresh.jsonl")
    generate(fresh)
    assert fresh.output.read_bytes() == whole


def test_a_greedy_file_goes_on_with_smaller_batches(model_folder: Path, tmp_path: Path) -> None:
    config = batch_config(model_folder, tmp_path)
    generate(config)
    content = config.output.read_bytes()
    config.output.write_bytes(content[: len(content) // 2])
    generate(dataclasses.replace(config, batch_size=1, seed=5))
    assert config.output.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.8}, r"answers\.jsonl:1 was made by another model or with other options"),
        ({"seed": 1}, r"answers\.jsonl:1 was made by another model or with other options"),
        ({"samples": 1}, r"answers\.jsonl:1 was made by another model or with other options"),
    ],
)
def test_lines_of_other_options_are_not_mixed(
    finished: tuple[GenerateConfig, bytes], change: dict[str, Any], message: str
) -> None:
    config, content = finished
    with pytest.raises(LabError, match=message):
        generate(dataclasses.replace(config, **change))
    assert config.output.read_bytes() == content


def test_lines_of_another_model_or_other_prompts_are_not_mixed(
    finished: tuple[GenerateConfig, bytes], tmp_path: Path
) -> None:
    config, content = finished
    copy = shutil.copytree(config.model, tmp_path / "copy")
    with pytest.raises(LabError, match="was made by another model"):
        generate(dataclasses.replace(config, model=str(copy)))
    write_prompts(tmp_path, [PROMPTS[0], "another", *PROMPTS[2:]])
    with pytest.raises(LabError, match=r"answers\.jsonl:3 belongs to other prompts"):
        generate(config)
    write_prompts(tmp_path, PROMPTS[:3])
    with pytest.raises(LabError, match=r"answers\.jsonl:7 belongs to other prompts"):
        generate(config)
    assert config.output.read_bytes() == content
    config.output.write_bytes(b"something else\n")
    with pytest.raises(LabError, match=r"answers\.jsonl:1 was not written by this command"):
        generate(config)
    assert config.output.read_bytes() == b"something else\n"


def test_two_processes_do_not_write_to_one_file(finished: tuple[GenerateConfig, bytes]) -> None:
    from filelock import FileLock

    config, content = finished
    with (
        FileLock(config.output.with_name(".answers.jsonl.lock")),
        pytest.raises(LabError, match="another process") as e,
    ):
        generate(config)
    assert e.value.exit_code == 4
    assert config.output.read_bytes() == content


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvshift.lab.prompts as module

    config = batch_config(model_folder, tmp_path)
    syncs = iter([None, OSError(28, "No space left on device")])

    def fsync(_: int) -> None:
        if (problem := next(syncs)) is not None:
            raise problem

    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(LabError, match=r"No space left on device; its 3 lines are whole") as error:
        generate(config)
    assert error.value.exit_code == 3
    assert len(lines(config.output)) == 3
    monkeypatch.undo()
    generate(config)
    assert [line["index"] for line in lines(config.output)] == [0, 1, 2, 3]


# Where a model is found


@pytest.fixture
def run_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A run that was stopped, in the layout of `kvshift train`: its checkpoints have no tokenizer."""
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    tokenizer().save_pretrained(run / "tokenizer")
    (run / "config.json").write_text(json.dumps({"steps": 3, "model": {"size": None}}))
    for step in (9, 100, 20):
        checkpoint = run / f"checkpoint-{step}"
        shutil.copytree(model_folder, checkpoint, ignore=shutil.ignore_patterns("*token*"))
        sizes = {path.name: {"size": path.stat().st_size} for path in checkpoint.iterdir()}
        (checkpoint / "manifest.json").write_text(json.dumps({"files": sizes}))
    return run


def said(name: Path) -> tuple[tuple[str, str], list[str]]:
    notes: list[str] = []
    return locate(str(name), notes.append), notes


def test_a_run_stands_for_its_newest_checkpoint_and_then_its_model(run_folder: Path, model_folder: Path) -> None:
    tokens = str(run_folder / "tokenizer")
    where, notes = said(run_folder)
    assert where == (str(run_folder / "checkpoint-100"), tokens)
    assert notes == [f"{run_folder} has no final model yet: taking checkpoint-100"]
    (run_folder / "checkpoint-100" / "manifest.json").unlink()  # being written
    assert said(run_folder)[0][0] == str(run_folder / "checkpoint-20")
    weights = run_folder / "checkpoint-20" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert said(run_folder)[0][0] == str(run_folder / "checkpoint-9")
    assert said(run_folder / "checkpoint-20")[0] == (str(run_folder / "checkpoint-20"), tokens)
    shutil.copytree(model_folder, run_folder / "model")
    assert said(run_folder) == ((str(run_folder / "model"), str(run_folder / "model")), [])


def test_generate_from_a_checkpoint(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run_folder), "--prompt", "to be", "--max-new-tokens", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("to be")
    assert printed.err == f"kvshift generate: {run_folder} has no final model yet: taking checkpoint-100\n"


def test_no_checkpoint_is_whole(run_folder: Path) -> None:
    for manifest in run_folder.glob("*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(LabError, match="none of its 3 checkpoints is whole"):
        said(run_folder)


def test_a_checkpoint_without_tokenizer(run_folder: Path) -> None:
    shutil.rmtree(run_folder / "tokenizer")
    with pytest.raises(LabError, match=r"checkpoint-100 has no tokenizer, neither in itself nor in .*tokenizer"):
        said(run_folder)


def test_the_folder_of_a_model_that_has_no_tokenizer(run_folder: Path) -> None:
    """What looks into a model, and asks it nothing, needs none."""
    shutil.rmtree(run_folder / "tokenizer")
    notes: list[str] = []
    assert loading.model_folder(run_folder, notes.append) == run_folder / "checkpoint-100"
    assert notes == [f"{run_folder} has no final model yet: taking checkpoint-100"]
    assert loading.model_folder(str(run_folder / "checkpoint-9"), notes.append) == run_folder / "checkpoint-9"
    assert len(notes) == 1
    with pytest.raises(LabError, match="model: there is no folder nobody/nothing"):
        loading.model_folder("nobody/nothing", notes.append)


def test_a_truncated_checkpoint_is_not_loaded(run_folder: Path) -> None:
    weights = run_folder / "checkpoint-100" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(LabError, match="checkpoint-100 could not be loaded"):
        load_model(str(weights.parent), say=print)


def test_a_checkpoint_that_lacks_weights_is_not_filled_up(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model_folder, tmp_path / "lacks")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.shift.alpha"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match=r"lacks 1 weights, model\.layers\.1\.self_attn\.shift\.alpha"):
        load_model(str(folder), say=print)


def test_a_pickled_checkpoint_is_not_loaded(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(KVShiftLlamaForCausalLM.from_pretrained(model_folder).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(LabError, match="could not be loaded"):
        load_model(str(folder), say=print)


def test_a_tokenizer_of_another_model(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "other")
    train_bpe(iter([*TEXT, "quite a few more words for a larger vocabulary of tokens"]), 300).save_pretrained(folder)
    with pytest.raises(
        LabError, match=r"tokenizer .* does not fit the model: its ids go up to \d+, the model's up to 276"
    ):
        load_model(str(folder), say=print)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./absent", r"there is no folder \./absent"),
        ("/absent/model", r"there is no folder /absent/model"),
        ("runs/a/b", r"there is no folder runs/a/b"),
        ("nobody/nothing", r"nobody/nothing is no folder here, and could not be had from the hub"),
    ],
)
def test_no_such_model(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LabError, match=message):
        load_model(name, say=print)


def test_no_model_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"is neither a model \(no config\.json with a model_type\) nor a run"):
        said(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="is a file; expected"):
        said(tmp_path / "file")


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of prompt and prompts must be given"),
        ({"prompt": "a", "prompts": Path("p.txt")}, "exactly one of prompt and prompts must be given"),
        ({"prompt": "a", "temperature": -0.1}, r"temperature must be 0 or more, got -0\.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"prompt": "a", "top_p": 0.0}, r"top_p must be more than 0 and at most 1, got 0\.0"),
        ({"prompt": "a", "top_p": 1.5}, r"top_p must be more than 0 and at most 1, got 1\.5"),
        ({"prompt": "a", "min_p": 1.5}, r"min_p must be between 0 and 1, got 1\.5"),
        ({"prompt": "a", "top_k": -1}, "top_k must be 0 or more, got -1"),
        ({"prompt": "a", "prompt_lookup": -1}, "prompt_lookup must be 0 or more, got -1"),
        ({"prompt": "a", "repetition_penalty": 0.0}, r"repetition_penalty must be more than 0, got 0\.0"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
        ({"prompt": "a", "num_beams": 0}, "num_beams must be 1 or more, got 0"),
        ({"prompt": "a", "samples": 0}, "samples must be 1 or more, got 0"),
        ({"prompt": "a", "batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"prompt": "a", "seed": -1}, "seed must be between 0 and"),
        ({"prompt": "a", "samples": 2, "temperature": 0.0}, "samples must be 1 with temperature 0"),
        ({"prompt": "a", "samples": 3, "num_beams": 2}, r"samples must not be more than num_beams \(2\), got 3"),
        ({"prompt": "a", "num_beams": 2, "prompt_lookup": 2}, "prompt_lookup must be 0 with num_beams"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        generate(GenerateConfig(model="absent", **options))


def test_wrong_device(model_folder: Path) -> None:
    for name in ("gpu", "cuda:99"):
        with pytest.raises(
            LabError, match=f"device must be auto, cpu, or an accelerator of this machine; got '{name}'"
        ):
            load_model(str(model_folder), device=name, say=print)


def test_too_long_a_prompt_is_named_before_anything_is_generated(model_folder: Path, tmp_path: Path) -> None:
    long = " ".join(["to be"] * 40)
    count = len(tokenizer()(long)["input_ids"])
    path = tmp_path / "prompts.txt"
    path.write_text(f"to be\n{long}\n")
    config = batch_config(model_folder, tmp_path, prompts=path)
    with pytest.raises(
        LabError, match=rf"prompts\.txt:2 has {count} token\(s\); .* 11 .* 64 .*: it takes a shorter prompt"
    ):
        generate(config)
    assert not config.output.exists()
    path.write_text("to be\n")
    one = len(tokenizer()("to be")["input_ids"])
    with pytest.raises(
        LabError, match=rf"has {one} token\(s\); with max_new_tokens 64 .*: it takes at most {64 - one}"
    ):
        generate(dataclasses.replace(config, max_new_tokens=64))


def test_prompts_of_a_text_file_are_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("to be\r\n\nnaïve ".encode())
    assert read_prompts(path) == ["to be", "", "naïve "]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', r"p\.jsonl:2: no JSON: "),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"}\n', r"p\.jsonl:2: no JSON: "),
        ("p.jsonl", b'{"text": "a"}\n', r'p\.jsonl:1: expected an object with a string "prompt", got {"text": "a"}'),
        ("p.jsonl", b'["a"]', r'p\.jsonl:1: expected an object with a string "prompt"'),
        ("p.jsonl", b'{"prompt": 3}', r'p\.jsonl:1: expected an object with a string "prompt"'),
        ("p.txt", b"", r"p\.txt is empty"),
        ("p.txt", b"caf\xe9", r"p\.txt cannot be read: .* position 3"),
        ("p.csv", b"a", r"prompts must be a \.txt .* or \.jsonl .* file, got .*p\.csv"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError, match=message):
        read_prompts(tmp_path / name)


def test_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"prompts: .*absent\.txt cannot be read: .*No such file"):
        read_prompts(tmp_path / "absent.txt")


def test_output_that_cannot_be_written(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "answers.jsonl"):
        with pytest.raises(LabError, match=r"output: .* cannot be written"):
            generate(dataclasses.replace(batch_config(model_folder, tmp_path), output=output))
