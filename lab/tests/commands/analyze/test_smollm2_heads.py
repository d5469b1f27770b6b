"""`kvshift analyze` on a trained model without shift finds the heads that trained language models are known for."""

from __future__ import annotations

import json
from pathlib import Path

from kvshift_lab.commands.analyze.command import AnalyzeConfig, analyze
from tests.smollm2 import FOLDER, pretrained

pytestmark = pretrained


def test_the_circuit_of_induction(tmp_path: Path):
    """Induction heads come after previous-token heads (Olsson et al. 2022), and the repeated half is predicted well."""
    analyze(AnalyzeConfig(run=FOLDER, out=tmp_path, rows=8))
    found = json.loads((tmp_path / "heads.json").read_text())
    heads, uniform, behaviour = found["heads"], found["uniform"], found["behaviour"]
    assert len(heads) == 30 * 9
    assert (found["coefficients"], found["window"]) == ([], 1)
    layers = {}
    for place, chance in (("previous", uniform["previous"]), ("earlier", uniform["earlier"])):
        best = [head["layer"] for head in heads if head["moved"][place] > 0.5]
        assert best, f"no head with {place} above 0.5"
        assert chance < 0.05
        layers[place] = best
    induction = [head["layer"] for head in heads if head["moved"]["earlier+1"] > 0.5]
    assert len(induction) >= 3
    assert min(layers["previous"]) < min(induction), "what matches must have been written before"
    assert all(head["alone"] == 0 for head in heads), "without shift no head does it alone"
    assert behaviour["second"]["accuracy"] > 0.5 > 100 * behaviour["first"]["accuracy"]
    assert behaviour["second"]["loss"] < behaviour["first"]["loss"] - 5
