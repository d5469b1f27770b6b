"""`check_model` finds a fault in every mutant, where it is, and nothing else."""

import pytest

from kvshift.models.check import Report, check_model

from ..llama.tiny import tiny_model
from .mutants import CHANGES_EVERYTHING, MUTANTS, sliding


def check_mutant(name: str, patch: pytest.MonkeyPatch, properties: list[str] | None) -> Report:
    model = sliding() if "window" in name else tiny_model()
    MUTANTS[name][0](patch)
    return check_model(model, length=16, properties=properties)


def assert_found(report: Report, name: str, properties: list[str]) -> None:
    for wanted in properties:
        verdict, begins = report.of(wanted), MUTANTS[name][1][wanted]
        if begins is not None:
            assert (verdict.first["case"], verdict.first["position"]) == begins
            assert verdict.verdict == "wrong"
            assert verdict.error > 10 * verdict.tolerance
        else:
            assert verdict.verdict in ("wrong", "not supported")  # what is ignored without a word is not supported


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found_where_it_begins(name, monkeypatch):
    wanted = [found for found, begins in MUTANTS[name][1].items() if begins is not None][:2]
    assert_found(check_mutant(name, monkeypatch, wanted), name, wanted)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.slow
def test_nothing_else_is_found(name, monkeypatch):
    report = check_mutant(name, monkeypatch, None)
    wanted = list(MUTANTS[name][1])
    assert_found(report, name, wanted)
    found = {verdict.property for verdict in report.verdicts if verdict.verdict != "right"}
    if name in CHANGES_EVERYTHING:
        assert found > {"batch", "cache: every split", "generate: greedy"}
    elif "window" in name:
        assert found == {*wanted, "cache: right padding"}  # a window counts the padding on the right, mutant or not
    else:
        assert found == set(wanted)
