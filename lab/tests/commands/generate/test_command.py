"""`kvshift generate`: each sequence is generated as if it were alone, and errors name their cause."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.cli import main
from kvshift_lab.commands.analyze.options import AnalyzeConfig
from kvshift_lab.commands.compare.options import CompareConfig
from kvshift_lab.commands.generate.command import GenerateConfig, _crop, encode, generate
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.data.tokenizers import load_tokenizer

from ...generation_cases import PROMPTS, batch_config, lines, save_model, tokenizer, write_prompts


@pytest.fixture(scope="module")
def greedy(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers to all prompts."""
    config = batch_config(model_folder, tmp_path_factory.mktemp("greedy"))
    generate(config)
    return lines(config.output)


def texts(path: Path | list[dict[str, Any]]) -> list[str]:
    return [line["text"] for line in (lines(path) if isinstance(path, Path) else path)]


# Generated text


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"repetition_penalty": 1.7}, {"prompt_lookup": 3}],
    ids=["greedy", "beams", "repetition penalty", "prompt lookup"],
)
def test_sequences_of_a_batch_are_as_alone(model_folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    config = batch_config(model_folder, tmp_path, **options)
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


def test_greedy_is_what_transformers_generates(model_folder: Path, greedy: list[dict[str, Any]]) -> None:
    model = KVShiftLlamaForCausalLM.from_pretrained(model_folder).eval()
    for line in greedy:
        ids = torch.tensor([tokenizer()(line["prompt"])["input_ids"]])
        new = model.generate(ids, max_new_tokens=11, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert line["text"] == tokenizer().decode(new, skip_special_tokens=True)
        assert (line["tokens"], line["finish"]) == (len(new), "end" if new[-1] == 0 else "length")


def test_a_text_that_the_model_ends(model_folder: Path, tmp_path: Path) -> None:
    """The third generated token becomes the token that ends a text."""
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
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = batch_config(model_folder, tmp_path, temperature=1.0, samples=2, seed=seed)
        config = dataclasses.replace(config, output=tmp_path / name)
        before = torch.get_rng_state()
        generate(config)
        assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is unchanged
        drawn[name] = texts(config.output)
    assert drawn["a"] == drawn["b"]
    assert all(one != other for one, other in zip(drawn["a"], drawn["c"], strict=True))
    assert len(set(drawn["a"])) == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}, {"prompt_lookup": 2}], ids=str
)
def test_what_gives_the_greedy_text(
    model_folder: Path, greedy: list[dict[str, Any]], tmp_path: Path, options: dict[str, Any]
) -> None:
    """At its extreme, each sampling option leaves only the likeliest token; prompt lookup only drafts it."""
    temperature = 0.0 if "prompt_lookup" in options else 1.0
    generate(config := batch_config(model_folder, tmp_path, **{"temperature": temperature, **options}))
    assert texts(config.output) == texts(greedy)


def test_all_tokens_are_drawn_from_unless_told_otherwise(model_folder: Path, tmp_path: Path) -> None:
    """Transformers samples from the 50 likeliest tokens by default; at a high temperature, more than 50 occur."""
    prompt = write_prompts(tmp_path, PROMPTS[:1])
    config = batch_config(model_folder, tmp_path, prompts=prompt, temperature=1e4, samples=400, max_new_tokens=1)
    generate(config)
    assert len(set(texts(config.output))) > 70


def test_no_two_batches_draw_the_same_numbers(model_folder: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, ["to be"] * 4)
    generate(config := batch_config(model_folder, tmp_path, prompts=prompts, temperature=1.0, batch_size=1))
    assert len(set(texts(config.output))) == 4


def test_text_begins_as_it_does_behind_its_prompt(tmp_path: Path) -> None:
    """Tokenizers with a sign for the space drop it at the start of a text, and a continuation is no start."""
    words = {"<end>": 0} | {f"▁{word}": number for number, word in enumerate(["to", "be", "or", "not", "that"], 1)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    folder = save_model(tmp_path / "model", vocab_size=len(words))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    generate(config := batch_config(folder, tmp_path, prompts=write_prompts(tmp_path, ["to be", "or", "not to"])))
    whole = [line["text"] for line in lines(config.output) if line["tokens"] > 1]
    assert whole
    assert all(text.startswith(" ") and text[1] != " " for text in whole)


def test_options_of_the_models_own_do_not_interfere(
    model_folder: Path, greedy: list[dict[str, Any]], tmp_path: Path
) -> None:
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
    generate(config := batch_config(folder, tmp_path))
    assert texts(config.output) == texts(greedy)


def test_another_model_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=277, n_positions=64, n_embd=20, n_layer=1, n_head=2))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config = batch_config(folder, tmp_path)
    generate(config)
    assert [line["prompt"] for line in lines(config.output)] == PROMPTS


# Printed text


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
    # Words are printed when a space follows. If all tokens are equally likely, there are a few.
    generate(GenerateConfig(model=str(model_folder), prompt="to be", max_new_tokens=50, temperature=1e4))
    assert seen[0] > 0  # the prompt, before the first token
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


def test_json_lines_on_stdout(
    model_folder: Path, greedy: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(dataclasses.replace(batch_config(model_folder, tmp_path), output=None))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == greedy


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


def test_generate_from_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = load_tokenizer(finished / "tokenizer")
    ids = torch.tensor([words("abc")["input_ids"]])
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model")
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=True)
    arguments = ["--prompt", "abc", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(["generate", str(finished), *arguments]) == 0
    assert capsys.readouterr().out == words.decode(expected[0], skip_special_tokens=True) + "\n"


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
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must be 1 or more, or None, got 0"),
        ({"prompt": "a", "num_beams": 0}, "num_beams must be 1 or more, got 0"),
        ({"prompt": "a", "samples": 0}, "samples must be 1 or more, got 0"),
        ({"prompt": "a", "batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"prompt": "a", "seed": -1}, "seed must be between 0 and"),
        ({"prompt": "a", "samples": 2, "temperature": 0.0}, "samples must be 1 with temperature 0"),
        ({"prompt": "a", "top_k": 5, "temperature": 0.0}, "top_k must be 0 with temperature 0"),
        ({"prompt": "a", "top_p": 0.9, "temperature": 0.0}, "top_p must be 1 with temperature 0"),
        ({"prompt": "a", "min_p": 0.1, "temperature": 0.0}, "min_p must be 0 with temperature 0"),
        ({"prompt": "a", "samples": 3, "num_beams": 2}, r"samples must not be more than num_beams \(2\), got 3"),
        ({"prompt": "a", "num_beams": 2, "prompt_lookup": 2}, "prompt_lookup must be 0 with num_beams"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        generate(GenerateConfig(model="absent", **options))


@pytest.mark.parametrize(("argument", "what"), [("caf\udce9", "character 3 is the byte 0xe9"), ("\ud83d", "U\\+D83D")])
def test_a_prompt_that_is_not_utf_8(argument: str, what: str) -> None:
    """Python decodes a command line in another encoding to such strings."""
    with pytest.raises(LabError, match=rf"^prompt is not UTF-8: .*{what}"):
        generate(GenerateConfig(model="absent", prompt=argument))
    with pytest.raises(LabError, match=r"^prompt is not UTF-8"):
        CompareConfig(prompt=argument).check()
    with pytest.raises(LabError, match=r"^text is not UTF-8"):
        AnalyzeConfig(run=Path("absent"), text=argument).check()


def test_a_stdin_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(LabError, match=r"^prompt \(stdin\) is not UTF-8: byte 3 is 0xe9"):
        generate(GenerateConfig(model="absent", prompt="-"))


def test_by_default_as_many_tokens_as_the_model_has_positions_for(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default is 64 minus the longest prompt, so each prompt of a file gets the same number in any batch."""
    longest = max(len(tokenizer()(prompt)["input_ids"]) for prompt in PROMPTS)
    config = batch_config(model_folder, tmp_path, max_new_tokens=None)
    generate(config)
    assert f"max_new_tokens is {64 - longest}: the model's maximum length is 64 tokens" in capsys.readouterr().err
    given = dataclasses.replace(config, max_new_tokens=64 - longest, output=tmp_path / "given.jsonl")
    generate(given)
    assert config.output.read_bytes() == given.output.read_bytes()
    roomy = save_model(tmp_path / "roomy", num_hidden_layers=1, max_position_embeddings=300, eos_token_id=None)
    tokenizer().save_pretrained(roomy)
    assert main(["generate", str(roomy), "--prompt", "to be", "--output", str(tmp_path / "one.jsonl")]) == 0
    assert lines(tmp_path / "one.jsonl")[0]["tokens"] <= 128
    assert capsys.readouterr().err == ""


def test_prompts_are_cropped_on_request(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [tokenizer()(text)["input_ids"] for text in ("to be, or not " * 30, "the mind")]
    long, short = (tokenizer().decode(row) for row in ids)
    config = batch_config(model_folder, tmp_path, prompts=write_prompts(tmp_path, [long, short]), crop_prompts=True)
    generate(config)
    cropped, whole = lines(config.output)
    assert cropped["prompt"] == long
    assert "1 prompt(s) are cropped to their last 53 tokens" in capsys.readouterr().err
    model = KVShiftLlamaForCausalLM.from_pretrained(model_folder).eval()
    for line, row in ((cropped, ids[0][-53:]), (whole, ids[1])):
        new = model.generate(torch.tensor([row]), max_new_tokens=11, do_sample=False, pad_token_id=0)[0, len(row) :]
        assert line["text"] == tokenizer().decode(new, skip_special_tokens=True)
    # Without a number, half of the 64 positions are for new tokens.
    generate(dataclasses.replace(config, max_new_tokens=None, output=tmp_path / "half.jsonl"))
    assert {line["tokens"] for line in lines(tmp_path / "half.jsonl") if line["finish"] == "length"} == {32}
    with pytest.raises(LabError, match="max_new_tokens must be less than the model's maximum length, 64, got 64"):
        generate(dataclasses.replace(config, max_new_tokens=64))


def test_the_token_that_begins_a_text_is_not_cropped() -> None:
    assert _crop([7, 1, 2, 3, 4], 3, begin=7) == [7, 3, 4]
    assert _crop([7, 1, 2, 3, 4], 3, begin=None) == [2, 3, 4]
    assert _crop([7, 1, 2, 3, 4], 1, begin=7) == [4]
    assert _crop([7, 1, 2], 3, begin=7) == [7, 1, 2]


def test_more_beams_than_can_be_drawn_from(model_folder: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    config = batch_config(model_folder, tmp_path, num_beams=2**24 // vocabulary + 1, temperature=1.0)
    with pytest.raises(LabError, match=rf"num_beams must be at most {2**24 // vocabulary} with temperature > 0"):
        generate(config)
    assert not config.output.exists()


def test_too_long_a_prompt_is_named_before_anything_is_generated(model_folder: Path, tmp_path: Path) -> None:
    long = " ".join(["to be"] * 40)
    count = len(tokenizer()(long)["input_ids"])
    path = tmp_path / "prompts.txt"
    path.write_text(f"to be\n{long}\n")
    config = batch_config(model_folder, tmp_path, prompts=path)
    with pytest.raises(
        LabError, match=rf"prompts\.txt:2 has {count} token\(s\); .* 11 .* 64 .*: give a shorter prompt"
    ):
        generate(config)
    assert not config.output.exists()
    path.write_text("to be\n")
    one = len(tokenizer()("to be")["input_ids"])
    with pytest.raises(
        LabError, match=rf"has {one} token\(s\); with max_new_tokens 64 .*: max_new_tokens may be at most {64 - one}"
    ):
        generate(dataclasses.replace(config, max_new_tokens=64))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"num_beams": 3}, {"num_beams": 3, "temperature": 0}, {"prompt_lookup": 2}],
    ids=["drawn", "greedy", "beams drawn", "beams", "lookup"],
)
def test_logits_that_are_not_finite_are_not_continued(options: dict, model_folder: Path, tmp_path: Path) -> None:
    """The weights are finite, but the logits overflow."""
    folder = shutil.copytree(model_folder, tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["model.embed_tokens.weight"], 3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    config = dataclasses.replace(batch_config(folder, tmp_path), dtype="bfloat16", **options)
    with pytest.raises(RunFailedError, match=r"model: its logits are not finite after \d+ tokens.*torch\.bfloat16"):
        generate(config)
