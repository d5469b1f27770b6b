"""`check_model` finds a fault in every mutant, where it is, and nothing else."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from kvshift.models.check import Report, check_model

from ..llama.tiny import tiny_model
from ..retrofit.tiny import shifted_gpt2
from ..retrofit.tiny_families import shifted
from .input_mutants import FAULTS, NAMED
from .mutants import CHANGES_EVERYTHING, MUTANTS, sliding

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "KVShiftLlama": tiny_model,
    "GPT-2": shifted_gpt2,
    "Qwen3": partial(shifted, "Qwen3", torch.float32),
    "Gemma 3": partial(shifted, "Gemma 3", torch.float32, sliding_window=16),
}


def check_mutant(name: str, patch: pytest.MonkeyPatch, properties: list[str] | None) -> Report:
    model = sliding() if "window" in name else tiny_model()
    MUTANTS[name][0](patch)
    return check_model(model, length=16, properties=properties)


def assert_found(report: Report, table: Mapping[str, tuple[str, int] | None], properties: Iterable[str]) -> None:
    for wanted in properties:
        verdict, begins = report.of(wanted), table[wanted]
        if begins is not None:
            assert (verdict.first["case"], verdict.first["position"]) == begins
            assert verdict.verdict == "wrong"
            assert verdict.error > 10 * verdict.tolerance
        else:
            assert verdict.verdict in ("wrong", "not supported")  # what is ignored without a word is not supported


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found_where_it_begins(name, monkeypatch):
    wanted = [found for found, begins in MUTANTS[name][1].items() if begins is not None][:2]
    assert_found(check_mutant(name, monkeypatch, wanted), MUTANTS[name][1], wanted)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.slow
def test_nothing_else_is_found(name, monkeypatch):
    report = check_mutant(name, monkeypatch, None)
    wanted = list(MUTANTS[name][1])
    assert_found(report, MUTANTS[name][1], wanted)
    found = {verdict.property for verdict in report.verdicts if verdict.verdict != "right"}
    if name in CHANGES_EVERYTHING:
        assert found > {"batch", "cache: every split", "generate: greedy"}
    elif "window" in name:
        assert found == {*wanted, "cache: right padding"}  # a window counts the padding on the right, mutant or not
    else:
        assert found == set(wanted)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[] if "Llama" in family or name in NAMED else pytest.mark.slow)
        for name in FAULTS
        for family in FAMILIES
    ],
)
def test_a_fault_of_what_a_call_is_given_is_found_in_every_family(name, family, monkeypatch):
    mutate, table = FAULTS[name]
    model = FAMILIES[family]()
    mutate(model, monkeypatch)
    wanted = [found for found, begins in table.items() if begins is not None]
    assert_found(check_model(model, length=16, properties=wanted), table, wanted)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_nothing_else_of_what_a_call_is_given_is_found(name, monkeypatch):
    mutate, table = FAULTS[name]
    model = tiny_model()
    mutate(model, monkeypatch)
    report = check_model(model, length=16)
    assert_found(report, table, table)
    assert {verdict.property for verdict in report.verdicts if verdict.verdict != "right"} == set(table)
