"""Probes find the same as slow loops, and change no bit of the training that they observe."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.commands.analyze.command import AnalyzeConfig, analyze
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.head_scores import measure_heads
from kvshift_lab.run.probes import (
    KINDS,
    SCORES,
    kinds_of_targets,
    probe_heads,
    probe_targets,
    summarize_targets,
)
from kvshift_lab.run.repeat_config import RepeatConfig
from kvshift_lab.run.train import train
from kvshift_lab.run.trainer import token_losses
from tests.models.llama.tiny import tiny_model

from ..run_cases import assert_same_bits, copied, metrics, result, tiny, weights

LONG = 97


def slow_kind(row, starts, t):
    """Return the kind of the target at t + 1 of one row, from the part of its document before it."""
    start = max(place for place in starts if place <= t)
    earlier = [s for s in range(start, t) if row[s] == row[t]]
    if any(row[s + 1] == row[t + 1] for s in earlier):
        return "pair_seen"
    return "token_seen" if earlier else "neither"


def rows_in_documents(rows=7, length=53, tokens=5, seed=0):
    """Return rows of few tokens, so that all kinds occur, the starts of their documents, and their positions."""
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(0, tokens, (rows, length)))
    starts = [sorted({0, *random.integers(1, length, 3).tolist()}) for _ in range(rows)]
    positions = torch.tensor([[t - max(s for s in row if s <= t) for t in range(length)] for row in starts])
    return ids, starts, positions


@pytest.mark.parametrize("tokens", [3, 11, 200_003])
@pytest.mark.parametrize("apart", [False, True])
def test_kinds_of_targets_are_those_of_a_slow_loop(apart, tokens):
    ids, starts, positions = rows_in_documents(tokens=min(tokens, 11))
    ids = ids * (tokens // 11 or 1)  # large token ids, too
    kinds = kinds_of_targets(ids, positions if apart else None)
    expected = [
        [KINDS.index(slow_kind(row, starts[number] if apart else [0], t)) for t in range(len(row) - 1)]
        for number, row in enumerate(ids.tolist())
    ]
    assert kinds.tolist() == expected
    assert {*kinds.flatten().tolist()} == {0, 1, 2}


def test_a_pair_may_overlap_the_one_before():
    assert kinds_of_targets(torch.tensor([[4, 4, 4, 4]])).tolist() == [[2, 0, 0]]
    assert kinds_of_targets(torch.tensor([[1, 2, 1, 3, 1, 2]])).tolist() == [[2, 2, 1, 2, 0]]


@pytest.mark.parametrize("apart", [False, True])
def test_losses_by_kind_and_position_are_those_of_a_slow_loop(apart):
    ids, starts, positions = rows_in_documents(length=613, tokens=40)
    labels = ids.clone()
    if apart:
        labels[positions == 0] = -100
    losses = torch.rand(7, 612, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses[labels[:, 1:] == -100] = 0
    found = summarize_targets(
        *(each.numpy() for each in probe_targets(losses, labels, ids, positions if apart else None))
    )
    by_kind = {kind: [] for kind in KINDS}
    early, late = [], []
    for number, row in enumerate(ids.tolist()):
        for t in range(612):
            if labels[number, t + 1] == -100:
                continue
            place, loss = int(positions[number, t]) if apart else t, float(losses[number, t])
            if place >= 64:
                by_kind[slow_kind(row, starts[number] if apart else [0], t)].append(loss)
            early += [loss] * (place == 49)
            late += [loss] * (place == 499)
    seen = sum(map(len, by_kind.values()))
    expected = {f"loss_{kind}": np.mean(values) for kind, values in by_kind.items()}
    expected |= {f"share_{kind}": len(values) / seen for kind, values in by_kind.items()}
    assert late or apart  # among rows cut at random, none may have so long a document
    expected |= {"late_minus_early": np.mean(late) - np.mean(early)} if late else {}
    assert found == pytest.approx(expected, rel=1e-12)


def test_what_is_not_there_has_no_loss():
    ids = torch.arange(70)[None]
    found = summarize_targets(*(each.numpy() for each in probe_targets(torch.ones(1, 69).double(), ids, ids, None)))
    assert found == {"loss_neither": 1, "share_pair_seen": 0, "share_token_seen": 0, "share_neither": 1}
    short = torch.arange(20)[None]
    assert summarize_targets(*(e.numpy() for e in probe_targets(torch.ones(1, 19).double(), short, short, None))) == {}


def test_scores_are_those_of_analyze_and_the_model_is_left_as_it_was():
    model = tiny_model(vocab_size=150, attention_dropout=0.3).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    random, attention = torch.get_rng_state(), model.config._attn_implementation
    found = probe_heads(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.config._attn_implementation == attention == "sdpa"
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    model.set_attn_implementation("eager")
    measured = measure_heads(model, RepeatConfig(rows=16))
    for head, score in zip(found["heads"], measured.heads, strict=True):
        assert (head["layer"], head["head"]) == (score.layer, score.head)
        for name, value in score.scores.items():
            assert head[name] == pytest.approx(value, rel=1e-5)
        assert head["prefix_matching"] == pytest.approx(score.prefix_matching, rel=1e-5)
    assert found["prefix_matching"] == max(head["prefix_matching"] for head in found["heads"])
    assert found["repeat_loss"] == pytest.approx(measured.behaviour["second"]["loss"], rel=1e-5)
    assert found["repeat_accuracy"] == measured.behaviour["second"]["accuracy"]


def longer(corpus, out, packing="concat", **changes):
    config = tiny(corpus, out, **changes)
    return replace(config, data=replace(config.data, sequence_length=LONG, packing=packing))


@pytest.fixture(scope="module", params=["concat", "documents"])
def both(request, corpus, tmp_path_factory):
    """Two runs, without and with probes, that use dropout, which draws random numbers at each step."""
    folder = tmp_path_factory.mktemp(request.param)
    model = {"attention_dropout": 0.25, "num_hidden_layers": 2, "intermediate_size": 32}
    (folder / "model.json").write_text(json.dumps(model))
    options = {"model": {"config": folder / "model.json"}, "keep_checkpoints": 9, "packing": request.param}
    train(longer(corpus, folder / "without", **options))
    train(longer(corpus, folder / "with", **options, probes="induction", report_to=("tensorboard",)))
    return SimpleNamespace(without=folder / "without", with_probes=folder / "with", packing=request.param)


def tensors(value, name=""):
    """Return all values of a loaded torch file, by their path in it."""
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in tensors(each, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for key, each in enumerate(value) for k, v in tensors(each, f"{name}.{key}").items()}
    return {name: value}


def test_probes_change_no_bit_of_training(both):
    assert_same_bits(weights(both.with_probes), weights(both.without))
    lines = [line for line in metrics(both.with_probes) if line["kind"] != "probes"]
    assert lines == metrics(both.without)
    assert result(both.with_probes) == result(both.without)  # including the hash of the options
    for checkpoint in ("checkpoint-4", "checkpoint-8", "checkpoint-12"):
        ours, theirs = both.with_probes / checkpoint, both.without / checkpoint
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            one, other = (tensors(torch.load(folder / name, weights_only=False)) for folder in (ours, theirs))
            assert one.keys() == other.keys()
            for place, value in one.items():
                same = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
                assert same(value, other[place]), (name, place)


def test_lines_at_each_evaluation(both):
    lines = metrics(both.with_probes, "probes")
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert [line["tokens"] for line in lines] == [line["step"] * 4 * LONG for line in lines]
    for line in lines:
        assert [(head["layer"], head["head"]) for head in line["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        for score in SCORES:
            assert line[score] == max(head[score] for head in line["heads"])
        assert sum(line[f"share_{kind}"] for kind in KINDS) == pytest.approx(1)
        assert 0 <= line["repeat_accuracy"] <= 1
        assert "late_minus_early" not in line  # the rows are too short for it
    assert metrics(both.without, "probes") == []


def test_the_page_names_every_number(both):
    page = (Path(__file__).parents[3] / "docs/probes.md").read_text(encoding="utf-8")
    numbers = metrics(both.with_probes, "probes")[-1].keys() - {"kind", "step", "tokens"}
    assert {name for name in numbers if f"`{name}`" not in page} == set()
    assert "`late_minus_early`" in page


def test_the_last_line_is_that_of_the_saved_model(both, corpus):
    model = KVShiftLlamaForCausalLM.from_pretrained(both.with_probes / "model").eval()
    config = longer(corpus, both.with_probes, packing=both.packing)
    data = load_text_data(config.data, seed=0, tokenizer_folder=both.with_probes / "tokenizer")
    rows = collate(list(data.validation))
    labels, positions = rows.pop("labels"), rows.get("position_ids")
    with torch.no_grad():
        losses = torch.stack(token_losses(model(**rows).logits, labels))
    last = metrics(both.with_probes, "probes")[-1]
    of_targets = summarize_targets(*(x.numpy() for x in probe_targets(losses, labels, rows["input_ids"], positions)))
    assert {name: last[name] for name in of_targets} == pytest.approx(of_targets, rel=1e-5)
    found = probe_heads(model)
    assert last["repeat_loss"] == pytest.approx(found["repeat_loss"], rel=1e-5)
    for head, score in zip(last["heads"], found["heads"], strict=True):
        assert head == pytest.approx(score, rel=1e-5)


def test_only_tokens_of_the_tokenizer_are_drawn(corpus, tmp_path):
    """A model may have more embeddings, for instance a multiple of 64; they are not trained."""
    train(tiny(corpus, tmp_path, model={"vocab_size": 2048}, probes="induction"))
    model = KVShiftLlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens:] = 100.0
    found = probe_heads(model, tokens)
    assert metrics(tmp_path, "probes")[-1]["repeat_loss"] == pytest.approx(found["repeat_loss"], rel=1e-5)
    analyze(AnalyzeConfig(run=tmp_path, out=tmp_path / "before"))
    model.save_pretrained(tmp_path / "model")
    analyze(AnalyzeConfig(run=tmp_path, out=tmp_path / "after"))
    before, after = (json.loads((tmp_path / name / "heads.json").read_text()) for name in ("before", "after"))
    assert before["behaviour"] == after["behaviour"]


def test_tensorboard_has_each_number(both):
    events = EventAccumulator(str(both.with_probes / "tensorboard"))
    events.Reload()
    last = metrics(both.with_probes, "probes")[-1]
    heads = {f"{name}/L{head['layer']}H{head['head']}": head[name] for head in last["heads"] for name in SCORES}
    plain = {name: value for name, value in last.items() if name not in ("kind", "step", "tokens", "heads")}
    for name, value in {**heads, **plain}.items():
        scalars = events.Scalars(f"eval/{name}")
        assert [scalar.step for scalar in scalars] == [5, 10, 12]
        assert scalars[-1].value == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("both", ["documents"], indirect=True)
def test_a_resumed_run_writes_the_same_lines(both, corpus, tmp_path):
    out = copied(both.with_probes, tmp_path)
    (out / "checkpoint-12" / "complete").unlink()
    options = {"model": {"config": both.without.parent / "model.json"}, "keep_checkpoints": 9, "packing": both.packing}
    train(longer(corpus, out, **options, probes="induction"))
    assert metrics(out) == metrics(both.with_probes)
    # Probes may end or begin where a run is continued.
    again = copied(both.with_probes, tmp_path / "again")
    (again / "checkpoint-12" / "complete").unlink()
    train(longer(corpus, again, **options))
    assert [line["step"] for line in metrics(again, "probes")] == [5]
    assert_same_bits(weights(again), weights(both.with_probes))


def test_other_models_are_probed_too(corpus, tmp_path):
    lines = []
    for probes in (None, "induction"):
        out = tmp_path / str(probes)
        train(tiny(corpus, out, steps=2, probes=probes, model={"variant": "differential"}))
        lines.append([line for line in metrics(out) if line["kind"] != "probes"])
    assert lines[0] == lines[1]
    assert_same_bits(weights(tmp_path / "induction"), weights(tmp_path / "None"))
    assert len(metrics(tmp_path / "induction", "probes")) == 1


def test_rows_too_short_for_the_scores_are_refused_before_training(corpus, tmp_path):
    config = tiny(corpus, tmp_path / "run", probes="induction")
    with pytest.raises(LabError, match=r"probes: the heads of this model cannot be scored: length .* leave probes out"):
        train(replace(config, data=replace(config.data, sequence_length=9)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
