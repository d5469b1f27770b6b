"""The summary and the table of a comparison, on run folders with numbers from a formula."""

import json
import math

import pytest

from kvshift_lab.commands.compare.summary import legend, summarize, table
from kvshift_lab.core.errors import LabError

from ...analysis.run_folders import write_pair, write_run
from .records import records

RATIO = {"ratio": 1.19, "low": 1.17, "high": 1.23}
STEP_TIME = {"milliseconds": {"vanilla": 31.0, "kv-shift": 37.0}, "ratios": {"kv-shift": RATIO}}


def cells(rows, label):
    (row,) = [row for row in rows if row[0] == label]
    return row[1:]


def test_one_seed(tmp_path):
    write_pair(tmp_path, gain=0.1)
    summary = summarize(records(tmp_path, [0]), STEP_TIME)
    left = math.exp(-3)
    assert summary["seeds"][0]["difference"]["kv-shift"]["mean"] == pytest.approx(-0.1 * (1 - left), rel=1e-12)
    # The differences of single sequences vary around that mean by the difference of two sines.
    spread = [0.001 * (math.sin(7 * row * 1.1) - math.sin(7 * row)) for row in range(7)]
    mean = sum(spread) / 7
    stderr = math.sqrt(sum((value - mean) ** 2 for value in spread) / 6 / 7)
    assert summary["seeds"][0]["difference"]["kv-shift"]["stderr"] == pytest.approx(stderr, rel=1e-6)
    # Between steps 50 and 60, the curve is a straight line; it reaches vanilla's last loss, 2 + 3 left, in between.
    at_50, at_60 = (3 * math.exp(-step / 20) - 0.1 * (1 - math.exp(-step / 20)) for step in (50, 60))
    crossing = 50 + 10 * (at_50 - 3 * left) / (at_50 - at_60)
    assert summary["seeds"][0]["reach"]["step"] == {"vanilla": 60, "kv-shift": pytest.approx(crossing, rel=1e-12)}
    assert summary["seeds"][0]["reach"]["tokens"]["kv-shift"] == pytest.approx(352 * crossing, rel=1e-12)
    assert summary["verdicts"]["kv-shift"]["outcome"] == "undecided"
    assert summary["parameters"] == {"vanilla": 5003, "kv-shift": 5027}
    assert summary["perplexity"]["vanilla"]["mean"] == pytest.approx(math.exp(2 + 3 * left))
    json.dumps(summary, allow_nan=False)


def test_the_perplexity_of_a_loss_beyond_700_is_that_of_700(tmp_path):
    write_pair(tmp_path, gain=0.1)
    vanilla, shifted = records(tmp_path, [0])
    vanilla.result["eval_loss"] = 35680.0
    found = summarize([vanilla, shifted])
    assert found["loss"]["vanilla"]["mean"] == 35680
    assert found["perplexity"]["vanilla"]["mean"] == math.exp(700)


def test_several_seeds(tmp_path):
    for seed, gain in enumerate((0.1, 0.11, 0.12)):
        write_pair(tmp_path, seed=seed, gain=gain)
    summary = summarize(records(tmp_path, range(3)))
    differences = [seed["difference"]["kv-shift"]["mean"] for seed in summary["seeds"]]
    assert summary["verdicts"]["kv-shift"]["difference"] == pytest.approx(sum(differences) / 3)
    assert summary["verdicts"]["kv-shift"]["outcome"] == "lower"
    rows = table(summary)
    assert len(cells(rows, "validation loss, seed 2")) == 3
    assert cells(rows, "mean of 3 seeds") == (
        "2.1494 ± 0.0000",
        "2.0448 ± 0.0055",
        "-0.1045 (95 %: -0.1281 to -0.0809)",
    )
    assert not [row for row in rows if row[0] == "time of a step"]  # not measured


def test_seeds_that_do_not_vary_have_no_interval_in_the_table(tmp_path):
    for seed in range(2):
        write_pair(tmp_path, seed=seed, gain=0.1)
    rows = table(summarize(records(tmp_path, range(2))))
    assert cells(rows, "mean of 2 seeds")[2] == "-0.0950"


THREE = ("vanilla", "kv-shift", "smear")


def test_more_than_two(tmp_path):
    """Each number of a variant equals that of a comparison of this variant alone with the baseline."""
    for seed in range(3):
        write_pair(tmp_path, seed=seed, gain=0.1 + 0.01 * seed)
        write_run(tmp_path / f"seed-{seed}" / "smear", seed=seed, variant="smear", gain=0.05 - 0.02 * seed)
    three, two, other = (
        summarize(records(tmp_path, range(3), variants)) for variants in (THREE, THREE[:2], (THREE[0], THREE[2]))
    )
    assert three["names"] == {"vanilla": "vanilla", "kv-shift": "KV-shift", "smear": "smear"}
    assert three["verdicts"] == two["verdicts"] | other["verdicts"]
    assert three["verdicts"]["smear"]["outcome"] == "no difference shown"
    assert three["verdicts"]["smear"]["text"].startswith("no difference shown")
    rows = table(three)
    assert rows[0] == ("", "vanilla", "KV-shift", "smear", "KV-shift to vanilla", "smear to vanilla")
    assert {len(row) for row in rows} == {6}
    for row, pair, alone in zip(rows[1:], table(two)[1:], table(other)[1:], strict=True):
        assert row == (*pair[:3], alone[2], pair[3], alone[3])
    assert "95 % by itself" in legend(three)
    assert "95 % by itself" not in legend(two)


def test_another_baseline(tmp_path):
    write_pair(tmp_path, gain=0.1)
    turned = summarize(records(tmp_path, [0], ("kv-shift", "vanilla")))
    straight = summarize(records(tmp_path, [0]))
    there, here = (each["seeds"][0]["difference"] for each in (straight, turned))
    assert here["vanilla"]["mean"] == -there["kv-shift"]["mean"]
    assert cells(table(turned), "steps to KV-shift's final loss") == ("60", "not reached", "")


def test_a_loss_that_is_not_reached(tmp_path):
    for seed, gain in enumerate((-0.1, 0.1)):
        write_pair(tmp_path, seed=seed, gain=gain)
    summary = summarize(records(tmp_path, [0]))
    assert summary["seeds"][0]["reach"]["step"]["kv-shift"] is None
    assert cells(table(summary), "steps to vanilla's final loss") == ("60", "not reached", "")
    both = table(summarize(records(tmp_path, range(2))))
    assert cells(both, "tokens to vanilla's final loss")[1] == "not reached by 1 of 2 seeds"


def test_steps_are_counted_to_the_end_of_vanilla_even_if_it_dipped_before(tmp_path):
    vanilla, _ = write_pair(tmp_path, gain=0.1)
    lines = [json.loads(line) for line in (vanilla / "metrics.jsonl").read_text().splitlines()]
    final = [line for line in lines if line["kind"] == "eval"][-1]
    for line in lines:
        if line["kind"] == "eval" and line["step"] == 40:
            line["loss"] = final["loss"] - 0.01
    (vanilla / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(records(tmp_path, [0]))["seeds"][0]["reach"]["step"]["vanilla"] == 60


def test_runs_on_other_sequences_are_not_compared(tmp_path):
    write_run(tmp_path / "seed-0" / "vanilla", shift_targets=(), rows=5)
    write_run(tmp_path / "seed-0" / "kvshift", rows=7)
    with pytest.raises(LabError, match="the same number of validation sequences, got 7 and 5"):
        summarize(records(tmp_path, [0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 61}, "steps: recorded 60, given 61"),
        ({"data": {"corpus": "other.txt"}}, r"data\.corpus: recorded 'tinyshakespeare', given 'other\.txt'"),
        ({"data_facts": {"train_sample": "9c"}}, r"data_facts\.train_sample: recorded '5e', given '9c'"),
        ({"model": {"hidden_size": 59, "shift_targets": ["k", "v"]}}, r"model\.hidden_size: recorded 53, given 59"),
    ],
)
def test_runs_that_are_no_twins_are_not_compared(tmp_path, change, message):
    _, shifted = write_pair(tmp_path)
    config = json.loads((shifted / "config.json").read_text())
    (shifted / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(LabError, match=f"differ in more than the variant: {message}$"):
        summarize(records(tmp_path, [0]))


def test_memory_that_no_system_told(tmp_path):
    vanilla, _ = write_pair(tmp_path)
    result = json.loads((vanilla / "result.json").read_text())
    (vanilla / "result.json").write_text(json.dumps({**result, "peak_memory_bytes": None}))
    summary = summarize(records(tmp_path, [0]))
    assert summary["peak_memory"] is None
    assert not [row for row in table(summary) if row[0] == "peak memory"]
