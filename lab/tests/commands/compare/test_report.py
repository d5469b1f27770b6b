"""The files that a comparison writes at its end."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvshift_lab.commands.compare.report import verdicts, write_report
from kvshift_lab.commands.compare.samples import sample
from kvshift_lab.commands.compare.summary import summarize
from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.errors import LabError

from ...analysis.pages import Page
from ...analysis.run_folders import write_pair, write_run
from ...run_cases import LENGTH
from .records import records

RATIO = {"ratio": 1.19, "low": 1.17, "high": 1.23}
STEP_TIME = {"milliseconds": {"vanilla": 31.0, "kv-shift": 37.0}, "ratios": {"kv-shift": RATIO}}
SAMPLES = {
    "prompt": "ROMEO:",
    "seed": 0,
    "temperature": 0.8,
    "texts": {"vanilla": "<b>What</b> & light", "KV-shift": "But soft"},
}


def add_samples_and_step_time(out):
    (out / "step_time.json").write_text(json.dumps(STEP_TIME))
    (out / "samples.json").write_text(json.dumps(SAMPLES))


def add_probes(out, *, names):
    """Add lines of probes beside the evaluations of both runs of seed 0."""
    for path in [out / "seed-0" / name / "metrics.jsonl" for name in ("vanilla", "kvshift")]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        found = [
            {"kind": "probes", "step": line["step"], "tokens": line["tokens"], **dict.fromkeys(names, 0.1), "heads": []}
            for line in evaluations
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *found]))


def report(folder, *runs, **options):
    """Write the report of the runs in a folder, and return their summary."""
    found, times = records(folder, *runs), folder / "step_time.json"
    summary = summarize(found, read_json(times) if times.exists() else None)
    write_report(folder, found, summary, **options)
    return summary


class Report:
    """The files that `write_report` leaves in a folder, and the summary that they show."""

    def __init__(self, folder, *runs, **options):
        self.folder, self.summary = folder, report(folder, *runs, **options)
        self.text = (folder / "report.html").read_text(encoding="utf-8")
        self.page = Page(self.text)
        self.words = self.page.text


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory):
    """A report on two seeds with samples and step times, and with probes in one of the seeds."""
    out = tmp_path_factory.mktemp("two")
    for seed in (0, 1):
        write_pair(out, seed=seed, gain=0.1 + 0.01 * seed)
    add_samples_and_step_time(out)
    add_probes(out, names=["prefix_matching"])
    return Report(out, [0, 1])


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    """A report on one seed without samples and step times, with probes in all its runs."""
    out = tmp_path_factory.mktemp("one")
    write_pair(out)
    add_probes(out, names=["prefix_matching", "repeat_loss", "loss_pair_seen"])
    return Report(out, [0])


@pytest.fixture(scope="module")
def four_variants(tmp_path_factory):
    """A report on four variants, two of them with shift coefficients, and the command for more seeds."""
    out = tmp_path_factory.mktemp("four")
    write_pair(out, gain=0.1)
    write_run(out / "seed-0" / "smear", variant="smear", gain=0.05)
    write_run(out / "seed-0" / "vshift", shift_targets=("v",), gain=0.05)
    return Report(out, [0], ("vanilla", "kv-shift", "smear", "v-shift"), more="kvshift compare --seeds=3")


def test_the_page_needs_nothing_but_itself(two_seeds):
    assert len(two_seeds.page.fetched) == 3  # the curves, and the coefficients of each seed
    assert two_seeds.page.needs_nothing_but_itself()
    assert "url(" not in two_seeds.text


def test_what_probes_found_is_drawn_where_every_run_has_it(one_seed, two_seeds):
    assert "<h2>Induction</h2>" in one_seed.text
    assert (one_seed.folder / "probes.svg").exists()
    assert "Induction" not in two_seeds.text
    assert not (two_seeds.folder / "probes.svg").exists()


def test_the_page_says_what_the_files_say(two_seeds):
    for expected in (
        verdicts(two_seeds.summary),
        "× 1.190 (quartiles 1.170 to 1.230)",
        "<b>What</b> & light",  # escaped as text, not markup
        "But soft",
        "kvshift train --seed 0",
        f"kvshift train --config {two_seeds.folder.resolve()}/seed-1/kvshift/config.json",
        '"hidden_size": 53',
        '"cpu": "<a CPU>"',
    ):
        assert expected in two_seeds.words


def test_summary_and_table_are_written(one_seed):
    folder, summary = one_seed.folder, one_seed.summary
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert re.search(r"^\| validation loss \| 2\.1494 ± 0\.0130 \|", text, re.MULTILINE)
    assert text.rstrip().endswith(verdicts(summary) + ".")
    names = {path.name for path in folder.iterdir()}
    assert {"curves.png", "curves.svg", "coefficients-seed-0.png", "coefficients-seed-0.svg"} <= names


def test_of_four_variants_all_are_shown(four_variants):
    said = verdicts(four_variants.summary)
    assert "V-shift and smear and KV-shift and vanilla" in four_variants.words
    assert said in four_variants.words
    assert "KV-shift minus vanilla is -0.0950" in said
    assert "smear minus vanilla is -0.0475" in said
    assert str(four_variants.folder.resolve() / "seed-0" / "smear") in four_variants.words


@pytest.mark.slow
def test_the_comparison_of_the_readme_is_still_drawn(tmp_path):
    root = Path(__file__).parents[4]
    kept = root / "results" / "compare"
    shutil.copytree(kept, tmp_path / "compare", ignore=shutil.ignore_patterns("learning_rates"))
    report(tmp_path / "compare", range(10, 20))
    drawn, published, page = (
        [line for line in path.read_text().splitlines() if "|" in line]
        for path in (tmp_path / "compare" / "table.md", kept / "table.md", root / "docs" / "compare.md")
    )
    assert drawn == published
    assert set(published) <= set(page)


def test_samples_end_where_the_positions_of_the_models_do(vanilla, finished):
    folders = {"vanilla": vanilla, "kv-shift": finished}
    made = sample(folders, prompt=None, tokens=120, temperature=0.0, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(vanilla / "tokenizer")
    for text in made["texts"].values():
        assert 0 < len(tokenizer(text)["input_ids"]) <= LENGTH - 16
    with pytest.raises(LabError, match=f"prompt has .* tokens, but the models have {LENGTH} positions"):
        sample(folders, prompt="abcd efgh " * 40, tokens=1, temperature=0.0, seed=0)
