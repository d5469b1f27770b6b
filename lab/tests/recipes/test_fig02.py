"""Figure 2: the verdicts follow from the records, and the figure is drawn from the records alone."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from kvshift_lab.recipes.fig02 import study as fig02
from kvshift_lab.recipes.fig02.study import FieldConfig, FlowConfig, compute_fields, compute_flows
from kvshift_lab.study.recipe import Record
from kvshift_lab.theory.limit_loss import exact
from kvshift_lab.theory.loss_field import Field, loss_field

from ..study.cases import made_up

RECIPE = fig02.RECIPE


@pytest.fixture(scope="module")
def computed() -> list[Record]:
    fields = [FieldConfig(form=form, points=21, drawn=7, starts=3) for form in fig02.FORMS]
    found = [made_up(config.form, **as_kept(compute_fields(config))) for config in fields]
    return [*found, made_up("flow", **as_kept(compute_flows(FlowConfig(time=1000.0, points=5))))]


@pytest.fixture
def records(computed: list[Record]) -> dict[str, Record]:
    return {record.arm.label: record for record in copy.deepcopy(computed)}


def as_kept(result: dict) -> dict:
    return json.loads(json.dumps(result))


def verdicts(records: dict[str, Record]) -> list[str]:
    return [claim.direction for claim in RECIPE.claims([*records.values()])]


@pytest.mark.slow
def test_what_the_formulas_give(records: dict[str, Record]) -> None:
    assert verdicts(records) == ["holds", "holds", "holds", "holds", "fails", "holds"]
    least, descent, sparse, _, script, flow = RECIPE.claims([*records.values()])
    assert "1.23758, 2.38421, 4.60882" in least.ours  # from the specification, not this code
    assert least.note == "there by Table 3 and by the script, too"
    assert descent.note.startswith("by Table 3, 33.3, 11.1, 0.0 % for O(T) = 0, 10, 100")  # 3, 1 and 0 of 9 starts
    assert sparse.ours.endswith("6, 3, 0 levels")
    assert "99.97" in sparse.note
    assert "script 1.50, 9.82, 99.97; Table 3 1.18, 2.49, 4.62; derived 1.24, 2.38, 4.61" in script.ours
    assert flow.ours.startswith("T = 32: a = (")
    assert "3.42" in flow.note


@pytest.mark.parametrize(
    ("claim", "panel", "changed"),
    [
        (0, "T = 12", {"minimum": [1, 0]}),
        (1, "T = 102", {"share_caught": 0.01}),
        (2, "T = 12", {"highest": 9.0}),
        (3, "T = 102", {"share_away": 0.9}),
    ],
    ids=["minimum", "caught", "span", "away"],
)
def test_other_fields_would_fail(records: dict[str, Record], claim: int, panel: str, changed: dict) -> None:
    records["exact"].result["panels"][panel].update(changed)
    found = verdicts(records)
    assert found.pop(claim) == "fails"
    assert found.count("fails") == 1  # the claim about the script, as before


def test_a_minimum_elsewhere_in_print_is_said(records: dict[str, Record]) -> None:
    records["paper"].result["panels"]["O(T) = 10"]["minimum"] = [1, 0]
    claim = RECIPE.claims([*records.values()])[0]
    assert (claim.direction, claim.note) == ("holds", "elsewhere by Table 3")


def test_a_script_of_the_theorem_would_hold(records: dict[str, Record]) -> None:
    records["script"] = made_up("script", **records["paper"].result)
    assert verdicts(records)[4] == "holds"


@pytest.mark.parametrize("end", [[0.5, 0.4, 12.0, 0.0], [0.0, 7.0, 1.0, 2.0]], ids=["keys", "values"])
def test_a_flow_that_ends_elsewhere_would_fail(records: dict[str, Record], end: list[float]) -> None:
    records["flow"].result["flows"][2]["coefficients"][-1] = end
    assert verdicts(records)[5] == "fails"


def test_a_flow_that_stays_above_the_square_would_fail(records: dict[str, Record]) -> None:
    flow = records["flow"].result["flows"][0]
    flow["loss"][-1] = flow["square"] + 0.01
    assert verdicts(records)[5] == "fails"


def test_what_is_drawn_is_the_field_to_five_digits_on_its_own_grid() -> None:
    panels = as_kept(compute_fields(FieldConfig(form="exact", points=3, drawn=31, starts=1)))["panels"]
    drawn, field = Field.from_json(panels["T = 4"]["drawn"]), loss_field(exact(4), 31)
    for name, tolerance in (("alpha1", 0), ("beta1", 0), ("loss", 5e-5), ("alpha1_step", 5e-5), ("beta1_step", 5e-5)):
        np.testing.assert_allclose(getattr(drawn, name), getattr(field, name), rtol=tolerance, atol=0)


def test_the_presets() -> None:
    assert [job.arm.label for job in RECIPE.jobs("paper", [0])] == ["exact", "paper", "script", "flow"]
    assert {job.config.points for job in RECIPE.jobs("paper", [0])[:3]} == {1000}  # the paper uses np.linspace
    for preset in RECIPE.presets:
        assert [job.seed for job in RECIPE.jobs(preset, [0, 1, 2])] == [0] * 4  # nothing is random
