"""Measures of repetition, by hand and against slow code, and `kvshift eval --repetition` from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvshift_lab.cli import main
from kvshift_lab.commands.eval import continuations
from kvshift_lab.commands.eval.command import evaluate
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.commands.eval.repetition import distinct, distinct_difference, loop_length, rep
from kvshift_lab.core.errors import LabError
from kvshift_lab.variants.continuing import continue_rows

from ...generation_cases import TEXT, save_model, tokenizer


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("abcd", 1, 0),
        ("abab", 1, 1 / 2),  # distinct: a b; all: a b a b
        ("abab", 2, 1 / 3),  # distinct: ab ba; all: ab ba ab
        ("abab", 3, 0),  # aba bab: no repetition
        ("aaaa", 1, 3 / 4),
        ("aaaa", 2, 2 / 3),
        ("aaaa", 4, 0),
        ("abcabcabc", 3, 4 / 7),  # distinct: abc bca cab, of seven
        ("abcdabcd", 4, 1 / 5),
        ("abc", 4, 0),
        ("a", 1, 0),
        ("", 1, 0),
    ],
)
def test_rep_by_hand(text, n, expected):
    assert rep(letters(text), n) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xababab", 2),
        ("ababab", 2),
        ("xabab", None),  # twice only
        ("abababx", None),  # not at its end
        ("abcabcabc", 3),
        ("zabcabcabc", 3),
        ("bcabcabca", 3),  # the phrase is bca
        ("aaaaaa", 2),  # aa three times
        ("aaaaa", None),
        ("baaaaaa", 2),
        ("abcdabcdabcd", 4),
        ("abacabacabac", 4),
        ("", None),
        ("ab", None),
    ],
)
def test_loops_by_hand(text, expected):
    assert loop_length(letters(text)) == expected


def test_distinct_by_hand():
    texts = [letters("abab"), letters("abc"), letters("b")]
    assert distinct(texts, 1).mean == 3 / 8  # distinct: a b c, of eight tokens
    assert distinct(texts, 2).mean == 3 / 8  # ab ba bc
    assert distinct(texts, 4).mean == 1 / 8
    assert distinct([[], []], 1).mean == 0
    assert distinct([letters("ab")], 1).stderr is None


def plain_distinct(texts: list[list[int]], n: int) -> float:
    found = set()
    for text in texts:
        for start in range(len(text) - n + 1):
            found.add(tuple(text[start : start + n]))
    return len(found) / sum(len(text) for text in texts)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_error_of_distinct_is_the_jackknife_s(n):
    random = np.random.default_rng(n)
    ours, theirs = ([random.integers(0, 7, random.integers(1, 19)).tolist() for _ in range(11)] for _ in range(2))
    without = [[plain_distinct(texts[:i] + texts[i + 1 :], n) for i in range(11)] for texts in (ours, theirs)]
    values = np.array(without[0])
    expected = math.sqrt(10 / 11 * sum((value - values.mean()) ** 2 for value in values))
    assert distinct(ours, n).mean == pytest.approx(plain_distinct(ours, n), rel=1e-12)
    assert distinct(ours, n).stderr == pytest.approx(expected, rel=1e-9)
    pair = distinct_difference(ours, theirs, n)
    assert pair.mean == pytest.approx(plain_distinct(ours, n) - plain_distinct(theirs, n), rel=1e-9)
    values = np.subtract(*without)
    assert pair.stderr == pytest.approx(math.sqrt(10 / 11 * sum((values - values.mean()) ** 2)), rel=1e-9)
    assert distinct_difference(ours, ours, n).stderr == 0


def test_what_cannot_be_counted():
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        rep([1, 2], 0)
    with pytest.raises(ValueError, match="ours and theirs must have the same number of continuations, got 2 and 1"):
        distinct_difference([[1], [2]], [[1]], 1)


# From end to end


PROMPTS = {"prompt_tokens": 5, "max_new_tokens": 17}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.jsonl"
    documents = [" ".join(TEXT), "to be", (TEXT[0] + " ") * 3]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    return path


def measured(folder: Path, text: Path, *against: Path, **options: Any) -> dict[str, Any]:
    output = text.with_name("repetition.json")
    found = evaluate(
        EvalConfig(
            model=str(folder),
            texts=(str(text),),
            repetition=True,
            against=tuple(map(str, against)),
            output=output,
            **{**PROMPTS, **options},
        )
    )
    assert json.loads(output.read_text()) == found
    return found


def parts(text: Path, length: int = 22) -> list[list[int]]:
    cut = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer()(json.loads(line)["text"])["input_ids"]
        cut += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return cut


def plain_greedy(model: Any, prompt: list[int], penalty: float) -> list[int]:
    """Decode without batches and cache; the penalty divides positive logits of seen tokens, and multiplies others."""
    ids = list(prompt)
    while len(ids) < len(prompt) + 17:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        for token in set(ids):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        token = int(logits.argmax())
        if token == 0:
            break
        ids.append(token)
    return ids[len(prompt) :]


def test_it_equals_a_plain_loop(model_folder, llama_folder, text):
    cut = parts(text)[:4]
    found = measured(model_folder, text, llama_folder, repetition_penalty=1.3, batch_size=3, limit=4)
    assert found["text"]["prompts"] == len(cut) == 4
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (model_folder, llama_folder)]
    for name, penalty in (("greedy", 1.0), ("greedy, penalty 1.3", 1.3)):
        written = [[plain_greedy(model, part[:5], penalty) for part in cut] for model in models]
        for model, texts in zip(found["models"], written, strict=True):
            measures = model["decodings"][name]
            for n in (1, 2, 3, 4):
                values = [rep(tokens, n) for tokens in texts]
                assert measures[f"rep-{n}"]["value"] == pytest.approx(np.mean(values), abs=1e-12)
                assert measures[f"rep-{n}"]["stderr"] == pytest.approx(
                    np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-12
                )
                assert measures[f"distinct-{n}"]["value"] == pytest.approx(plain_distinct(texts, n), abs=1e-12)
            assert measures["loops"]["value"] == np.mean([loop_length(tokens) is not None for tokens in texts])
            assert measures["tokens"]["value"] == np.mean([len(tokens) for tokens in texts])
        pair = found["differences"][0]["decodings"][name]["rep-1"]
        values = np.subtract(*([rep(tokens, 1) for tokens in texts] for texts in written))
        half = t.ppf(0.975, len(cut) - 1) * np.std(values, ddof=1) / math.sqrt(len(cut))
        assert (pair["low"], pair["high"]) == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-12)
    assert found["itself"]["rep-2"]["value"] == pytest.approx(np.mean([rep(part[5:], 2) for part in cut]), abs=1e-12)


def test_draws_are_of_the_seed(model_folder, text):
    found = [measured(model_folder, text, seed=seed)["models"][0]["decodings"] for seed in (0, 0, 1)]
    drawn = [name for name in found[0] if name.startswith("sampled at temperature 1")]
    assert len(drawn) == 2
    assert found[0] == found[1]
    for name in found[0]:
        assert (found[0][name] == found[2][name]) == (name not in drawn)


def test_a_model_against_itself_differs_by_nothing(model_folder, text, capsys):
    (pair,) = measured(model_folder, text, model_folder, limit=2)["differences"]
    for name, measures in pair["decodings"].items():
        assert all(values["difference"] == values["low"] == values["high"] == 0 for values in measures.values()), name
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rep-2", "rep-4", "loops", "distinct-1", "distinct-2", "tokens"]
    assert lines[1].startswith("the text itself  ")
    assert lines[2].startswith(f"{model_folder}, greedy  ")
    assert lines[11].startswith(f"{model_folder} minus {model_folder}  ")
    assert lines[-1].startswith("2 prompts of 5 tokens; ")


def test_one_prompt_has_no_error(model_folder, text, capsys):
    found = measured(model_folder, text, model_folder, limit=1)
    assert found["models"][0]["decodings"]["greedy"]["rep-2"]["stderr"] is None
    assert found["differences"][0]["decodings"]["greedy"]["rep-2"]["low"] is None
    printed = capsys.readouterr().out
    assert "1 prompt of 5 tokens; " in printed
    assert "±" not in printed.split("1 prompt of")[0]


def test_a_model_that_repeats_is_seen_to(model_folder, text, tmp_path):
    """Where each token predicts itself, every continuation is a loop, and the penalty ends it."""
    folder = tmp_path / "repeating"
    model = LlamaForCausalLM.from_pretrained(save_model(folder, LlamaForCausalLM))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    found = measured(folder, text, model_folder, repetition_penalty=100.0)
    greedy, penalized = (found["models"][0]["decodings"][name] for name in ("greedy", "greedy, penalty 100"))
    assert greedy["loops"]["value"] == 1
    assert greedy["rep-1"]["value"] == pytest.approx(16 / 17)
    assert penalized["loops"]["value"] == 0
    assert found["differences"][0]["decodings"]["greedy"]["rep-4"]["low"] > 0.5


class StoppedError(Exception):
    pass


def test_a_stopped_command_continues_the_rest_alone(model_folder, llama_folder, text, monkeypatch):
    """The command may be stopped anywhere, also in the middle of a line; draws equal those of an uninterrupted one."""
    made = 0
    most = None

    def stopping(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal made
        if made == most:
            raise StoppedError
        made += 1
        return continue_rows(*args, **kwargs)

    monkeypatch.setattr(continuations, "continue_rows", stopping)
    output, kept = text.with_name("repetition.json"), text.with_name("repetition.answers.jsonl")
    options = {"batch_size": 3, "max_new_tokens": 4, "limit": 5}
    found = []
    for stops in ((), (0, 7), (5,)):
        kept.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
        made = 0
        for most in stops:
            with pytest.raises(StoppedError):
                measured(model_folder, text, llama_folder, **options)
            assert not output.exists()
            assert made == most == len(kept.read_text().splitlines())
            with kept.open("a") as file:
                file.write('{"key": "cut off')
        most = None
        found.append(measured(model_folder, text, llama_folder, **options))
        assert made == 2 * 4 * 2  # models, decodings, batches
    assert found[0]["models"] == found[1]["models"] == found[2]["models"]
    most = made  # from here on, any further batch raises
    assert measured(model_folder, text, llama_folder, **options)["models"] == found[0]["models"]
    with pytest.raises(StoppedError):
        measured(model_folder, text, llama_folder, **options, seed=1)


def test_what_is_longer_than_the_context_is_refused_before_a_model_is_loaded(model_folder, text, monkeypatch):
    monkeypatch.setattr(continuations, "load_model", lambda *args, **kwargs: pytest.fail("too late"))
    message = r"prompt_tokens \+ max_new_tokens must be at most 64, the longest context of .*, got 48 \+ 17"
    with pytest.raises(LabError, match=message):
        measured(model_folder, text, prompt_tokens=48)


def test_a_beginning_of_text_token_takes_a_place(model_folder, text):
    config = EvalConfig(model=str(model_folder), texts=(str(text),), prompt_tokens=48, max_new_tokens=16)
    model = continuations.prepare(str(model_folder), config)
    continuations._check([model], config)
    with pytest.raises(LabError, match=r"must be at most 63, the longest context of .* without the beginning-of-text"):
        continuations._check([model._replace(begin=0)], config)


def test_other_tokenizers_and_texts_that_are_too_short(model_folder, gpt2_folder, text, tmp_path):
    with pytest.raises(
        LabError, match=r"against: .*gpt2 and .* must have the same tokenizer, because repetition is counted"
    ):
        measured(model_folder, text, gpt2_folder)
    short = tmp_path / "short.txt"
    short.write_text("to be or not")
    with pytest.raises(
        LabError, match=r"texts: no document of .*short\.txt has 22 tokens, the length of a prompt with its"
    ):
        measured(model_folder, short)


def test_from_the_command_line(model_folder, text, capsys):
    arguments = ["eval", str(model_folder), str(text), "--repetition", "--limit", "2"]
    assert main([*arguments, "--prompt-tokens", "5", "--max-new-tokens", "7"]) == 0
    assert "sampled at temperature 1, penalty 1.1  " in capsys.readouterr().out
