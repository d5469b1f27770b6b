"""`kvshift eval` against a plain loop over AutoModelForCausalLM, its output, and what it refuses."""

from __future__ import annotations

import json
import math
import random
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from kvshift_lab.cli import main
from kvshift_lab.commands.eval import text_scores
from kvshift_lab.commands.eval.command import evaluate
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.trainer import summarize

from ...generation_cases import tokenizer

WORDS = ["to", "be", "not", "that is", "the question", "whether", "nobler", "in", "naïve", "café", "—", "東京", "🙂"]


def write_documents(path: Path, count: int = 13, longest: int = 30) -> list[str]:
    chance = random.Random(1)
    documents = ["t" + " ".join(chance.choices(WORDS, k=chance.randint(1, longest))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return documents


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    return write_documents(tmp_path / "held_out.jsonl")


def plain_loop(
    folder: Path, sequences: list[list[int]], window: int, stride: int
) -> tuple[list[float], list[int], list[int]]:
    """Return loss, sequence and token of every scored position, without batches, padding or streams."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses, numbers, tokens = [], [], []
    for number, ids in enumerate(sequences):
        end_before = 0
        for start in range(0, len(ids), stride):
            end = min(start + window, len(ids))
            with torch.no_grad():
                log_p = model(torch.tensor([ids[start:end]])).logits[0].log_softmax(-1)
            for position in range(max(end_before, start + 1), end):
                losses.append(-log_p[position - 1 - start, ids[position]].item())
                numbers.append(number)
                tokens.append(ids[position])
            end_before = end
            if end == len(ids):
                break
    return losses, numbers, tokens


def evaluated(folder: Path, tmp_path: Path, *against: Path, **options: Any) -> dict[str, Any]:
    output = tmp_path / "eval.json"
    texts = options.pop("texts", (str(tmp_path / "held_out.jsonl"),))
    found = evaluate(
        EvalConfig(model=str(folder), texts=texts, against=tuple(map(str, against)), output=output, **options)
    )
    assert json.loads(output.read_text()) == found
    return found


LAYOUTS = {
    "documents apart": {},
    "documents apart, short windows": {"window": 11},
    "documents apart, strided": {"window": 23, "stride": 7},
    "concatenated": {"packing": "concat"},
    "concatenated, strided": {"packing": "concat", "window": 37, "stride": 5},
    "rows as in training": {"packing": "concat", "window": 29, "stride": 29},
    "with a token before the first": {"begin": "yes", "window": 13},
}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *((layout, "shifted") for layout in LAYOUTS),
        ("documents apart, strided", "llama"),
        ("concatenated, strided", "gpt2"),
    ],
)
def test_it_equals_a_plain_loop(layout, model, model_folder, llama_folder, gpt2_folder, documents, tmp_path):
    folder = {"shifted": model_folder, "llama": llama_folder, "gpt2": gpt2_folder}[model]
    options = LAYOUTS[layout]
    tokens = AutoTokenizer.from_pretrained(folder)
    sequences = [tokens(text)["input_ids"] for text in documents]
    if options.get("packing") == "concat":
        sequences = [sequences[0] + [id for ids in sequences[1:] for id in (tokens.eos_token_id, *ids)]]
    if options.get("begin"):
        sequences = [[tokens.bos_token_id, *ids] for ids in sequences]
    window = options.get("window", 64)
    losses, numbers, scored = plain_loop(folder, sequences, window, options.get("stride", window - 1))

    (found,) = evaluated(folder, tmp_path, **options)["models"]
    assert found["tokens"] == len(losses)
    assert found["loss"] == pytest.approx(np.mean(losses), abs=1e-6, rel=0)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    if layout != "rows as in training":  # its first tokens are not scored, and may be parts of characters
        assert found["bytes"] == sum(
            len(tokens.convert_ids_to_tokens(id)) for id in scored if id != tokens.eos_token_id
        )
    bits = sum(losses) / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, abs=1e-6, rel=0)
    if options.get("packing") != "concat":  # each document is a block
        per_document = [np.bincount(numbers, weights) for weights in (losses, None)]
        per_document = [values[per_document[1] > 0] for values in per_document]
        expected = summarize(*per_document)
        assert found["blocks"] == expected["rows"]
        assert found["loss_stderr"] == pytest.approx(expected["loss_stderr"], rel=1e-4)


@pytest.mark.parametrize("packing", ["documents", "concat"])
def test_the_batch_size_changes_nothing(packing, model_folder, documents, tmp_path):
    found = [
        evaluated(model_folder, tmp_path, packing=packing, window=19, stride=11, batch_size=size)["models"][0]
        for size in (1, 3, 64)
    ]
    numbers = [{name: value for name, value in row.items() if name not in ("name", "source")} for row in found]
    assert numbers[1] == pytest.approx(numbers[0], abs=0, rel=1e-6)
    assert numbers[2] == pytest.approx(numbers[0], abs=0, rel=1e-6)


def test_a_token_that_the_tokenizer_puts_before_a_text(model_folder, documents, tmp_path):
    """The token is added by default, and never scored."""
    folder = tmp_path / "begins"
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    begins = tokenizer()
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    begins.save_pretrained(folder)
    sequences = [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in documents]
    assert all(ids[0] == 0 for ids in sequences)
    losses, *_ = plain_loop(folder, sequences, 64, 63)
    (found,) = evaluated(folder, tmp_path)["models"]
    assert found["loss"] == pytest.approx(np.mean(losses), abs=1e-6, rel=0)
    assert found["bytes"] == sum(len(text.encode()) for text in documents)
    (without,) = evaluated(folder, tmp_path, begin="no")["models"]
    assert without["tokens"] == found["tokens"] - len(documents)


def test_several_files_are_one_text_in_the_column_that_is_given(model_folder, documents, tmp_path):
    whole = evaluated(model_folder, tmp_path)["models"][0]
    halves = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    halves[0].write_text("".join(json.dumps({"body": text}) + "\n" for text in [*documents[:5], " \n"]))
    pq.write_table(pa.table({"body": documents[5:]}), halves[1])
    found = evaluated(model_folder, tmp_path, texts=tuple(map(str, halves)), text_column="body")
    assert found["models"][0] == whole
    assert found["text"]["documents"] == len(documents)
    assert found["text"]["bytes"] == sum(len(text.encode()) for text in documents)


def test_paired_differences(model_folder, llama_folder, documents, tmp_path):
    found = evaluated(model_folder, tmp_path, llama_folder, model_folder)
    ours, theirs, again = found["models"]
    other, same = found["differences"]
    assert (other["name"], other["minus"]) == (str(model_folder), str(llama_folder))
    for name in ("loss", "bits_per_byte"):
        pair = other[name]
        assert pair["difference"] == pytest.approx(ours[name] - theirs[name], abs=1e-12)
        assert pair["low"] < pair["difference"] < pair["high"]
        assert pair["high"] - pair["difference"] == pytest.approx(2.1788 * pair["stderr"], rel=1e-4)  # t(0.975, 12)
        assert (same[name]["difference"], same[name]["stderr"]) == (0, 0)
    assert again == ours
    # Paired by hand: the losses of each document, with the models' own tokens.
    per_document = []
    for folder in (model_folder, llama_folder):
        sequences = [tokenizer()(text)["input_ids"] for text in documents]
        losses, numbers, _ = plain_loop(folder, sequences, 64, 63)
        per_document.append(np.bincount(numbers, losses))
    difference = summarize(per_document[0] - per_document[1], np.bincount(numbers))
    assert other["loss"]["stderr"] == pytest.approx(difference["loss_stderr"], rel=1e-4)


def test_models_with_other_tokenizers_are_compared_by_bytes(model_folder, gpt2_folder, documents, tmp_path, capsys):
    (pair,) = evaluated(model_folder, tmp_path, gpt2_folder, begin="yes")["differences"]
    assert pair["loss"] is None
    assert pair["bits_per_byte"]["blocks"] == len(documents)
    printed = capsys.readouterr().out
    assert "Models with different tokenizers are compared only by bits per byte." in printed


def test_the_page_names_what_the_output_holds(model_folder, llama_folder, documents, tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "eval.md").read_text(encoding="utf-8")
    found = evaluated(model_folder, tmp_path, llama_folder)
    pair = found["differences"][0]
    for name in {*found, *found["text"], *found["models"][0], *pair, *pair["loss"]}:
        assert f"`{name.removesuffix('_stderr')}`" in page
    options = EvalConfig.__dataclass_fields__
    assert all(name.replace("-", "_") in options for name in re.findall(r"`--([a-z-]+)[ `]", page) if name != "data")


def test_long_documents_are_blocks_whichever_the_tokenizer(model_folder, gpt2_folder, tmp_path):
    text = write_documents(tmp_path / "held_out.jsonl", count=5, longest=2000)
    assert sum(len(document.encode()) > 4096 for document in text) >= 2
    found = evaluated(model_folder, tmp_path, gpt2_folder, batch_size=64)
    expected = sum(-(-len(document.encode()) // 4096) for document in text)
    assert [model["blocks"] for model in found["models"]] == [expected, expected]
    assert found["differences"][0]["bits_per_byte"]["blocks"] == expected


def test_one_block_has_no_error(model_folder, tmp_path, capsys):
    write_documents(tmp_path / "held_out.jsonl", count=1)
    found = evaluated(model_folder, tmp_path, model_folder)
    assert found["models"][0]["loss_stderr"] is None
    assert found["differences"][0]["loss"]["low"] is None
    assert "±" not in capsys.readouterr().out.split("documents scored")[0]


class NoModel:
    """A model that predicts all tokens with the same probability, and takes no time."""

    config = LlamaConfig()
    device = torch.device("cpu")

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(num_embeddings=277)

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1).expand(*input_ids.shape, 277))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(model_folder, tmp_path, monkeypatch):
    """The parts read, tokenized and scored at once are small against both sizes."""
    monkeypatch.setattr(text_scores, "load_weights", lambda *args, **kwargs: NoModel())
    monkeypatch.setattr("kvshift_lab.data.token_stream._BATCH_CHARACTERS", 2**13)
    monkeypatch.setattr("kvshift_lab.data.pieces._PIECE_CHARACTERS", 2**12)
    line = "to be or not to be, that is the question: whether 'tis nobler in the mind\n" * 54
    peaks = []
    for kilobytes in (64, 256):
        path = tmp_path / f"{kilobytes}.jsonl"
        path.write_text((json.dumps({"text": line}) + "\n") * (kilobytes * 1024 // len(line)))
        tracemalloc.start()
        found = evaluated(model_folder, tmp_path, texts=(str(path),), batch_size=4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found["models"][0]["bytes"] > 0.97 * kilobytes * 1024
    assert peaks[1] < 1.03 * peaks[0]


TASKS: dict[str, Any] = {"texts": (), "tasks": ("mmlu",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": ()}, r"FILE is missing: give a text to evaluate on \(kvshift eval MODEL FILE"),
        ({"window": 1}, "window must be 2 or more, or None, got 1"),
        ({"stride": 0}, "stride must be 1 or more, or None, got 0"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"output": Path("absent/eval.json")}, "output must be a file in a folder that exists"),
        (TASKS | {"texts": ("held_out.txt",)}, r"FILE and --tasks cannot be combined, got FILE held_out\.txt"),
        ({"limit": 3}, "limit has no effect on a text: leave it out"),
        ({"data": "here"}, "data has no effect on a text: leave it out"),
        (TASKS | {"limit": 0}, "limit must be 1 or more, or None, got 0"),
        (TASKS | {"stride": 7}, "stride has no effect with tasks: leave it out"),
        (TASKS | {"begin": "yes"}, "begin has no effect with tasks: leave it out"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, message):
    with pytest.raises(LabError, match=message):
        evaluate(EvalConfig(**{"model": "anywhere", "texts": ("held_out.txt",)} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 65}, r"window must be at most 64, the longest context of .*model, got 65"),
        ({"window": 9, "stride": 10}, r"stride must be at most window \(9\), so that no text is skipped .*; got 10"),
        ({"texts": ("absent.txt",)}, r"texts: 'absent.txt' is neither a bundled corpus"),
        ({"against": ("./absent",)}, r"model: there is no folder \./absent"),
        ({"text_column": "body"}, "no text_column 'body'.* --text-column NAME"),
        ({"device": "gpu"}, "device must be auto, cpu, or an accelerator of this machine; got 'gpu'"),
        ({"split": "test"}, r"split is only for hub datasets, got 'test'"),
    ],
    ids=str,
)
def test_what_is_refused_before_a_model_is_loaded(options, message, model_folder, documents, tmp_path, monkeypatch):
    monkeypatch.setattr(text_scores, "load_weights", lambda *args, **kwargs: pytest.fail("too late"))
    with pytest.raises(LabError, match=message):
        evaluate(EvalConfig(**{"model": str(model_folder), "texts": (str(tmp_path / "held_out.jsonl"),)} | options))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no text; documents of only whitespace do not count"),
        (b" \n\t", "contains no text"),
        (b"t", "there is no token to score for .*: every sequence is a single token"),
    ],
)
def test_texts_that_cannot_be_scored(content, message, model_folder, tmp_path):
    path = tmp_path / "held_out.txt"
    path.write_bytes(content)
    with pytest.raises(LabError, match=message):
        evaluate(EvalConfig(model=str(model_folder), texts=(str(path),)))


def test_memory_that_does_not_suffice(model_folder, documents, tmp_path, monkeypatch, capsys):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2 PiB")

    monkeypatch.setattr(text_scores, "score", fail)
    assert main(["eval", str(model_folder), str(tmp_path / "held_out.jsonl"), "--window", "9"]) == 3
    said = "out of memory: tried to allocate 2 PiB. Give a smaller batch_size (now 8) or window (now 9)\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_loss_that_is_not_finite(model_folder, documents, tmp_path):
    folder = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.lm_head.weight.data.mul_(1e38)  # finite, as weights must be, while their products are not
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    assert main(["eval", str(folder), str(tmp_path / "held_out.jsonl")]) == 3


def test_blocks_without_tokens_change_no_standard_error():
    """A document may be a single token for one of two models, which then scores nothing in it."""
    random = np.random.default_rng(0)
    weights = random.integers(1, 9, 50).astype(float)
    sums = weights * random.normal(3, 1, 50)
    values = text_scores._block_values(sums, weights)
    with_empty = text_scores._block_values(np.pad(sums, (0, 450)), np.pad(weights, (0, 450)))
    for some in (values, with_empty):
        assert some.mean() == pytest.approx(sums.sum() / weights.sum(), rel=1e-12)
    stderr, of_all = (values.std(ddof=1) / math.sqrt(len(values)) for values in (values, with_empty))
    assert of_all == pytest.approx(stderr, rel=0.02)
