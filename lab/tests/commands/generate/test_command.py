"""`kvshift generate`: the tokens of transformers, whatever the model's settings, and errors that name their cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.cli import main
from kvshift_lab.commands.generate.command import GenerateConfig, encode, generate
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.data.tokenizers import load_tokenizer

from ...generation_cases import PROMPTS, save_model, tokenizer


def written(capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, **options: Any) -> list[dict[str, Any]]:
    generate(GenerateConfig(model=str(model), prompts=prompts, **{"max_new_tokens": 11, **options}))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def test_greedy_is_what_transformers_generates(model_folder: Path, prompts: Path, tmp_path: Path, capsys) -> None:
    """Defaults of the model do not interfere."""
    model, words = KVShiftLlamaForCausalLM.from_pretrained(model_folder), tokenizer()
    folder = shutil.copytree(model_folder, tmp_path / "model")
    GenerationConfig(do_sample=True, top_k=3, repetition_penalty=2.0, eos_token_id=0).save_pretrained(folder)
    lines = written(capsys, folder, prompts, temperature=0.0)
    assert [line["prompt"] for line in lines] == PROMPTS
    for line in lines:
        ids = torch.tensor([words(line["prompt"])["input_ids"]])
        expected = model.generate(ids, max_new_tokens=11, do_sample=False, pad_token_id=0, eos_token_id=0)[0]
        assert line["prompt"] + line["text"] == words.decode(expected, skip_special_tokens=True)
        assert line["sample"] == 0


def test_draws_follow_the_seed(model_folder: Path, prompts: Path, capsys) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, same, other = (written(capsys, model_folder, prompts, samples=2, seed=seed) for seed in (1, 1, 2))
    assert first == same
    texts, others = ([line["text"] for line in lines] for lines in (first, other))
    assert len(set(texts)) == len(texts) == 2 * len(PROMPTS)
    assert not set(texts) & set(others)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_prompt_is_printed_with_its_continuation(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = load_tokenizer(finished / "tokenizer")
    ids = torch.tensor([words("abc")["input_ids"]])
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model")
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=True)
    arguments = ["--prompt", "abc", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(["generate", str(finished), *arguments]) == 0
    assert capsys.readouterr().out == words.decode(expected[0], skip_special_tokens=True) + "\n"


def test_an_empty_prompt_begins_a_text(model_folder: Path) -> None:
    assert encode(tokenizer(), "") == [0]
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(LabError, match="prompt is empty, and the tokenizer has no token that begins or ends a text"):
        encode(bare, "")


def test_text_begins_as_it_does_behind_its_prompt(tmp_path: Path, capsys) -> None:
    """A tokenizer of the kind of SentencePiece drops the space at the beginning of a text."""
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁b"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    words.decoder = decoders.Metaspace()  # type: ignore[assignment]
    save_model(tmp_path / "model", vocab_size=2, bos_token_id=None, eos_token_id=None)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a b\n")
    (line,) = written(capsys, tmp_path / "model", tmp_path / "prompts.txt", max_new_tokens=2)
    assert line["text"][0] == " "


def test_another_model_of_transformers(tmp_path: Path, prompts: Path, capsys) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=277, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer().save_pretrained(tmp_path / "gpt2")
    assert len(written(capsys, tmp_path / "gpt2", prompts)) == len(PROMPTS)


def test_by_default_as_many_tokens_as_fit(tmp_path: Path, prompts: Path, capsys) -> None:
    folder = save_model(tmp_path / "model", max_position_embeddings=40, bos_token_id=None, eos_token_id=None)
    tokenizer().save_pretrained(folder)
    words = tokenizer()
    for line in written(capsys, folder, prompts, max_new_tokens=None, temperature=0.0):
        model, ids = KVShiftLlamaForCausalLM.from_pretrained(folder), words(line["prompt"])["input_ids"]
        expected = model.generate(torch.tensor([ids]), max_new_tokens=40 - len(ids), do_sample=False, pad_token_id=0)
        assert line["prompt"] + line["text"] == words.decode(expected[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of prompt and prompts must be given"),
        ({"prompt": "a", "prompts": Path("p.txt")}, "exactly one of prompt and prompts must be given"),
        ({"prompt": "caf\udce9"}, "character 3 is the byte 0xe9"),
        ({"prompt": "a", "temperature": -0.1}, r"temperature must be 0 or more, got -0\.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"prompt": "a", "top_p": 0.0}, r"top_p must be more than 0 and at most 1, got 0\.0"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must be 1 or more, or None, got 0"),
        ({"prompt": "a", "samples": 0}, "samples must be 1 or more, got 0"),
        ({"prompt": "a", "seed": -1}, "seed must be between 0 and"),
        ({"prompt": "a", "samples": 2, "temperature": 0.0}, "samples must be 1 with temperature 0"),
        ({"prompt": "a", "top_p": 0.9, "temperature": 0.0}, "top_p must be 1 with temperature 0"),
        ({"prompts": Path("absent.txt")}, r"prompts: absent\.txt cannot be read"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        generate(GenerateConfig(model="absent", **options))


def test_an_empty_file_and_too_long_a_prompt_are_named(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(LabError, match=r"prompts: .*empty\.txt is empty"):
        generate(GenerateConfig(model=str(model_folder), prompts=tmp_path / "empty.txt"))
    with pytest.raises(LabError, match=r"prompt has \d+ token\(s\); with max_new_tokens 64 that is more than .* 64"):
        generate(GenerateConfig(model=str(model_folder), prompt="to be", max_new_tokens=64))


def test_the_longest_prompt_is_named_before_any_is_continued(model_folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "prompts.txt").write_text("to be\n" + "or not to be " * 30)
    with pytest.raises(LabError, match=r"prompt 'or not to be or .*' has \d+ token\(s\)"):
        generate(GenerateConfig(model=str(model_folder), prompts=tmp_path / "prompts.txt"))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("behind", ["<|endoftext|>", "<|endoftext|> <|endoftext|>"])
def test_tokens_that_a_tokenizer_puts_behind_every_text_are_left_out(behind: str) -> None:
    """The model would continue what follows the end of the text."""
    words = tokenizer()
    expected = words("to be")["input_ids"]
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"$A {behind}", special_tokens=[("<|endoftext|>", 0)]
    )
    assert words("to be")["input_ids"] == expected + [0] * len(behind.split())
    assert encode(words, "to be") == expected
    assert encode(words, "")[0] == 0
    letters = Tokenizer(models.BPE({"<s>": 0, "A": 1, "C": 2}, []))  # knows no other letter
    letters.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    assert encode(PreTrainedTokenizerFast(tokenizer_object=letters), "CA") == [0, 2, 1]


def test_logits_that_are_not_finite_are_not_continued(model_folder: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunFailedError, match="its logits are not finite after"):
        generate(GenerateConfig(model=str(folder), prompt="to be"))
