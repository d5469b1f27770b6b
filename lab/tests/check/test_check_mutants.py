"""`check_model` finds the fault of every mutant where it is, and nothing else."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from kvshift.models import decoder
from kvshift_lab.check import Report, check_model
from tests.models.llama.tiny import tiny_model
from tests.models.retrofit.tiny_families import shifted, shifted_gpt2

from .input_mutants import FAULTS, NAMED
from .mutants import CHANGES_EVERYTHING, MUTANTS, sliding

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "KVShiftLlama": tiny_model,
    "GPT-2": shifted_gpt2,
    "Qwen3": partial(shifted, "Qwen3", torch.float32),
    "Gemma 3": partial(shifted, "Gemma 3", torch.float32, sliding_window=16),
}
Table = dict[str, tuple[str, int] | None]
ALL: dict[str, tuple[Callable[[PreTrainedModel, pytest.MonkeyPatch], None], Table]] = FAULTS | {
    name: (lambda model, patch, mutate=mutate: mutate(patch), table) for name, (mutate, table) in MUTANTS.items()
}


def check_mutant(name: str, patch: pytest.MonkeyPatch, properties: list[str] | None, family: str) -> Report:
    model = sliding() if name.startswith("window") else FAMILIES[family]()
    ALL[name][0](model, patch)
    # The faults are in Python; the kernel of the next token, which does all of that in one call, has its own mutants.
    patch.setattr(decoder, "prepare_next_token", lambda *_: {})
    return check_model(model, length=16, properties=properties)


def assert_found(name: str, report: Report) -> None:
    """Check the verdict on every property that the fault makes wrong and that is in the report."""
    for verdict in report.verdicts:
        if verdict.property not in ALL[name][1]:
            continue
        begins = ALL[name][1][verdict.property]
        if begins is not None:
            assert (verdict.first["case"], verdict.first["position"]) == begins
            assert verdict.verdict == "wrong"
            assert verdict.error > 10 * verdict.tolerance
        else:
            assert verdict.verdict in ("wrong", "not supported")  # silently ignored arguments are not supported


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[] if "Llama" in family or name in NAMED else pytest.mark.slow)
        for name in ALL
        for family in FAMILIES
        if name in FAULTS or family == "KVShiftLlama"
    ],
)
def test_a_fault_is_found_where_it_begins(name, family, monkeypatch):
    wanted = [found for found, begins in ALL[name][1].items() if begins is not None]
    assert_found(name, check_mutant(name, monkeypatch, wanted if name in FAULTS else wanted[:2], family))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_nothing_else_is_found(name, monkeypatch):
    report, wanted = check_mutant(name, monkeypatch, None, "KVShiftLlama"), set(ALL[name][1])
    assert_found(name, report)
    found = {verdict.property for verdict in report.verdicts if verdict.verdict != "right"}
    if name in CHANGES_EVERYTHING:
        assert found > {"batch", "cache: every split", "generate: greedy"}
    elif name.startswith("window"):
        assert found == {*wanted, "cache: right padding"}  # a window counts padding on the right in any case
    else:
        assert found == wanted
