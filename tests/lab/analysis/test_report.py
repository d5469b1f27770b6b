"""The files a comparison ends with."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvshift.lab.analysis import pages
from kvshift.lab.analysis.probe_curves import PANELS
from kvshift.lab.analysis.report import verdicts, write_report

from .narrow import faults_on_a_phone
from .run_folders import write_pair, write_run

pytestmark = pytest.mark.no_models

RATIO = {"ratio": 1.19, "low": 1.17, "high": 1.23}
STEP_TIME = {"milliseconds": {"vanilla": 31.0, "kv-shift": 37.0}, "ratios": {"kv-shift": RATIO}}
SAMPLES = {
    "prompt": "ROMEO:",
    "seed": 0,
    "temperature": 0.8,
    "texts": {"vanilla": "<b>What</b> & light", "KV-shift": "But soft"},
}


class Page(HTMLParser):
    """Collects the text, and all that a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.words, self.fetched, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.words.append(data)


def written(out, seeds):
    for seed in seeds:
        write_pair(out, seed=seed, gain=0.1 + 0.01 * seed)
    (out / "step_time.json").write_text(json.dumps(STEP_TIME))
    (out / "samples.json").write_text(json.dumps(SAMPLES))
    return write_report(out, seeds)


def test_the_page_needs_nothing_but_itself(tmp_path):
    written(tmp_path, [0, 1])
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.fetched) == 3  # the curves, and the coefficients of each seed
    for source in page.fetched:
        head, code = source.split(",", 1)
        assert head == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(code))  # whole, well-formed
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def add_probes(out, *, names, seeds=(0, 1)):
    """Lines of probes beside the evaluations of each run."""
    for path in [out / f"seed-{seed}" / name / "metrics.jsonl" for seed in seeds for name in ("vanilla", "kvshift")]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        found = [
            {"kind": "probes", "step": line["step"], "tokens": line["tokens"], **dict.fromkeys(names, 0.1), "heads": []}
            for line in evaluations
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *found]))


def test_what_probes_found_is_drawn_with_a_panel_for_each_number(tmp_path):
    for seed in (0, 1):
        write_pair(tmp_path, seed=seed)
    add_probes(tmp_path, names=["prefix_matching", "repeat_loss", "loss_pair_seen"])
    write_report(tmp_path, [0, 1])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Induction</h2>" in text
    assert len(Page(text).fetched) == 4
    drawn = (tmp_path / "probes.svg").read_text(encoding="utf-8")
    titles = {PANELS[name][0] for name in PANELS if f"<!-- {PANELS[name][0]} -->" in drawn}
    assert titles == {PANELS[name][0] for name in ("prefix_matching", "repeat_loss", "loss_pair_seen")}
    assert (tmp_path / "probes.png").exists()
    assert faults_on_a_phone(text) == []


def test_without_probes_in_every_run_nothing_is_drawn_of_them(tmp_path):
    for seed in (0, 1):
        write_pair(tmp_path, seed=seed)
    add_probes(tmp_path, names=["prefix_matching"], seeds=(0,))
    write_report(tmp_path, [0, 1])
    assert "Induction" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "probes.svg").exists()


def test_a_phone_shows_all_of_it(tmp_path):
    write_pair(tmp_path, gain=0.1)
    write_run(tmp_path / "seed-0" / "smear", variant="smear", gain=0.05)
    write_report(tmp_path, [0], ("vanilla", "kv-shift", "smear"), more="kvshift compare --seeds=3")
    assert faults_on_a_phone((tmp_path / "report.html").read_text(encoding="utf-8")) == []


def test_the_page_says_what_the_files_say(tmp_path):
    summary = written(tmp_path, [0, 1])
    words = " ".join("".join(Page((tmp_path / "report.html").read_text(encoding="utf-8")).words).split())
    assert verdicts(summary) in words
    for expected in (
        "× 1.190 (quartiles 1.170 to 1.230)",
        "<b>What</b> & light",  # text, not markup
        "But soft",
        "kvshift train --seed 1",
        str(tmp_path.resolve() / "seed-1" / "kvshift"),
        '"hidden_size": 53',
        '"cpu": "<a CPU>"',
    ):
        assert expected in words


def test_summary_and_table_are_written(tmp_path):
    summary = written(tmp_path, [0])
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert re.search(r"^\| validation loss \| 2\.1494 ± 0\.0130 \|", text, re.MULTILINE)
    assert text.rstrip().endswith(verdicts(summary) + ".")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"curves.png", "curves.svg", "coefficients-seed-0.png", "coefficients-seed-0.svg"} <= names


def test_it_is_drawn_without_samples_and_step_time(tmp_path):
    write_pair(tmp_path)
    assert write_report(tmp_path, [0])["step_time"] is None
    assert "A sample of each" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_drawn_twice_it_is_the_same_bytes(tmp_path):
    written(tmp_path, [0])
    files = ("report.html", "summary.json", "table.md", "curves.svg", "curves.png")
    first = {name: (tmp_path / name).read_bytes() for name in files}
    write_report(tmp_path, [0])
    assert {name: (tmp_path / name).read_bytes() for name in files} == first


def test_of_three_variants_all_are_shown(tmp_path):
    write_pair(tmp_path, gain=0.1)
    write_run(tmp_path / "seed-0" / "smear", variant="smear", gain=0.05)
    summary = write_report(tmp_path, [0], ("vanilla", "kv-shift", "smear"))
    words = " ".join("".join(Page((tmp_path / "report.html").read_text(encoding="utf-8")).words).split())
    assert "smear and KV-shift and vanilla" in words
    assert verdicts(summary) in words
    assert "KV-shift minus vanilla is -0.0950" in verdicts(summary)
    assert "smear minus vanilla is -0.0475" in verdicts(summary)
    assert str(tmp_path.resolve() / "seed-0" / "smear") in words


def test_of_two_that_shift_the_coefficients_of_each_are_shown(tmp_path):
    write_pair(tmp_path)
    write_run(tmp_path / "seed-0" / "vshift", shift_targets=("v",), gain=0.05)
    write_report(tmp_path, [0], ("vanilla", "kv-shift", "v-shift"))
    found = {path.name for path in tmp_path.glob("coefficients-*.png")}
    assert found == {"coefficients-seed-0.png", "coefficients-vshift-seed-0.png"}
    words = " ".join("".join(Page((tmp_path / "report.html").read_text(encoding="utf-8")).words).split())
    assert "KV-shift, seed 0" in words
    assert "V-shift, seed 0" in words.replace("KV-shift, seed 0", "")


@pytest.mark.slow
def test_the_comparison_of_the_readme_is_still_drawn(tmp_path):
    root = Path(__file__).parents[3]
    kept = root / "results" / "compare"
    shutil.copytree(kept, tmp_path / "compare", ignore=shutil.ignore_patterns("learning_rates"))
    write_report(tmp_path / "compare", range(10, 20))
    drawn, published, page = (
        [line for line in path.read_text().splitlines() if "|" in line]
        for path in (tmp_path / "compare" / "table.md", kept / "table.md", root / "docs" / "compare.md")
    )
    assert drawn == published
    assert set(published) <= set(page)


def test_reports_and_the_explorer_have_one_palette():
    """The stylesheet is in a report as it is, and nothing beside it names a color."""
    lab = Path(pages.__file__).parents[1]
    look = (lab / "analysis/look.css").read_text(encoding="utf-8")
    assert look.strip() in pages.render("base.html.jinja", title="A report")
    assert look.count("--ink: #") == 2  # light and dark
    assert '<link rel="stylesheet" href="look.css">' in (lab / "explore/page/index.html").read_text(encoding="utf-8")
    for name in ("analysis/base.html.jinja", "explore/page/explore.css"):
        assert re.findall(r"#[0-9a-f]{3,8}\b|rgb\(\d", (lab / name).read_text(encoding="utf-8")) == []
