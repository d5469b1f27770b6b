"""A sharded step without memory: a process holds what the formulas predict, and nothing is left behind."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.recipes.fig03.dry_run import dry_run
from kvshift_lab.study.cost import count_parameters, training_memory
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.model_config import ModelConfig

# As in tests/layers/test_sharding.py, nothing changes the views in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def config(size: str, layers: int, *, shift: bool = True) -> KVShiftLlamaConfig:
    options = ModelConfig(size=size, shift_targets=None if shift else ())
    made = llama_config(options, vocab_size=1, sequence_length=64)
    made.num_hidden_layers = layers
    return made


@pytest.mark.parametrize(
    ("size", "devices"),
    [pytest.param("2.9B", 512, marks=pytest.mark.slow), pytest.param("19B", 240, marks=pytest.mark.slow), ("0.2B", 3)],
)
def test_a_process_holds_its_share_as_planned(size: str, devices: int) -> None:
    """With two layers at full width. Rows are distributed whole, so the first process may hold one more of each."""
    made = config(size, 2)
    found = dry_run(made, devices=devices, sequence_length=64)
    assert found.parameters == count_parameters(made).total
    planned = training_memory(
        made,
        rows=1,
        sequence_length=64,
        precision="bf16",
        gradient_checkpointing=False,
        sharding="fsdp",
        devices=devices,
    )
    assert 1 <= found.weights / planned.weights < 1.04
    assert (found.gradients, found.optimizer) == (found.weights, 2 * found.weights)
    assert 4 * found.parameters / devices <= found.weights


def test_what_is_gathered_is_the_largest_group() -> None:
    made = config("2.9B", 2)
    found = dry_run(made, devices=4, sequence_length=8)
    counted = count_parameters(made)
    assert found.gathered == 2 * max(counted.layer, counted.total - 2 * counted.layer)


def test_vanilla_has_no_coefficients() -> None:
    with_shift, without = (
        dry_run(config("0.2B", 1, shift=shift), devices=2, sequence_length=8) for shift in (True, False)
    )
    assert with_shift.parameters - without.parameters == 4 * 4  # KV heads


def test_no_memory_is_taken_and_no_group_is_left() -> None:
    """A layer of the 19B model and its embeddings have 0.97 billion parameters; a real step takes 15 GB."""
    state, before = torch.random.get_rng_state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = dry_run(config("19B", 1), devices=8, sequence_length=4)
    assert found.parameters > 9e8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert not dist.is_initialized()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_be_sharded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="devices must be 1 or more, got 0"):
        dry_run(config("0.2B", 1), devices=0, sequence_length=8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="one is already initialized"):
            dry_run(config("0.2B", 1), devices=2, sequence_length=8)
    finally:
        dist.destroy_process_group()
