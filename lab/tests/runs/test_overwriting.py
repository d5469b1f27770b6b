"""`--overwrite`: a run replaces another, of which nothing is removed before the new one can begin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.training.train import train

from ..run_cases import assert_same_run, copied, metrics, tiny


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_is_replaced(finished, corpus, tmp_path):
    """The new run has other options and another vocabulary; leftovers of a kill are removed, too."""
    out = copied(finished, tmp_path, without=())
    (out / "checkpoint-3.corrupt").mkdir()
    (out / ".tokenizer-abcdefgh").mkdir()
    config = tiny(corpus, out, steps=4, save_every=2, overwrite=True)
    train(replace(config, data=replace(config.data, vocab_size=270)))
    recorded = json.loads((out / "config.json").read_text())
    assert (recorded["steps"], recorded["model"]["vocab_size"]) == (4, 270)
    assert "overwrite" not in recorded
    assert {path.name for path in out.glob("*")} == {path.name for path in finished.glob("*")} - {
        "checkpoint-8",
        "checkpoint-12",
    } | {"checkpoint-2", "checkpoint-4"}
    assert max(line["step"] for line in metrics(out)) == 4


def test_the_same_options_train_again(finished, corpus, tmp_path, capfd):
    out = copied(finished, tmp_path, without=())
    (out / "metrics.jsonl").write_text("")
    train(tiny(corpus, out, overwrite=True))
    assert "checkpoint" not in capfd.readouterr().err
    assert_same_run(out, finished)


def test_a_new_folder_is_no_obstacle(corpus, tmp_path):
    train(tiny(corpus, tmp_path / "new", steps=1, overwrite=True))
    assert (tmp_path / "new" / "result.json").exists()


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint-best", "data"])
def test_a_folder_that_holds_anything_else_is_left(finished, corpus, tmp_path, name):
    out = copied(finished, tmp_path, without=())
    (out / name).mkdir()
    before = files(out)
    with pytest.raises(
        LabError, match=rf"overwrite: .*run contains files that do not belong to a run \({name}\); nothing was removed"
    ):
        train(tiny(corpus, out, steps=4, overwrite=True))
    assert files(out) == before
    assert (out / name).exists()


def test_what_is_no_run_is_left(corpus, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(LabError, match="does not belong to a run"):
        train(tiny(corpus, tmp_path, overwrite=True))
    assert files(tmp_path).keys() >= {"config.json"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"data": {"packing": "rows"}}, "packing"),
        ({"data": {"text_column": "body"}}, "body"),
        ({"model": {"num_key_value_heads": 3}}, "num_key_value_heads"),
        ({"tokens_per_step": 149}, "tokens_per_step must be a multiple of 148"),
        ({"init_from": "absent/of/all"}, "init_from: there is no folder"),
        ({"extend": True}, "extend and overwrite cannot both be given"),
    ],
    ids=str,
)
def test_options_that_cannot_be_cost_nothing(finished, corpus, tmp_path, changes, said):
    out = copied(finished, tmp_path, without=())
    before = files(out)
    with pytest.raises(LabError, match=said):
        train(tiny(corpus, out, overwrite=True, **changes))
    assert files(out) == before


def test_a_model_in_the_folder_itself_is_no_start(finished, corpus, tmp_path):
    out = copied(finished, tmp_path, without=())
    with pytest.raises(LabError, match="is in the folder that would be removed"):
        train(tiny(corpus, out, overwrite=True, init_from=str(out / "model")))
