"""The formulas of `kvshift_lab.study.cost` against counts on the models that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from kvshift.models.llama import SIZES, KVShiftLlamaConfig, KVShiftLlamaForCausalLM, size_config
from kvshift_lab.run.optimizer import recompute_activations
from kvshift_lab.study.cost import count_parameters, training_flops, training_memory
from tests.covering import covering
from tests.models.llama.tiny import SIZES as SMALL

# No two sizes share a factor beyond what Llama requires, so that a swapped letter shows.
OWN = {"vocab_size": 211, "intermediate_size": 109, "num_hidden_layers": 3, "attention_bias": False}
TINY: dict[str, Any] = {**SMALL, **OWN}
ROWS, TOKENS = 5, 67
PAGE = Path(__file__).parents[3] / "docs/choose_a_size.md"

VARIANTS: dict[str, dict[str, Any]] = {
    "kv": {},
    "vanilla": {"shift_targets": ()},
    "k": {"shift_targets": ("k",)},
    "qkv, window 3": {"shift_targets": ("q", "k", "v"), "shift_window": 3},
    "gate": {"shift_constraint": "gate"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qk-norm": {"qk_norm": True},
    "tied": {"tie_word_embeddings": True},
    "every head its own": {"num_key_value_heads": 6},
    "sliding window": {"sliding_window": 19},
    "window wider than the row": {"sliding_window": 97},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def tiny(checkpointing: bool = False, **options: Any) -> KVShiftLlamaForCausalLM:
    torch.manual_seed(0)
    model = KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**{**TINY, **options}))
    if checkpointing:
        recompute_activations(model)
    return model.train()


def ids(rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(1))


def check_parameters(config: KVShiftLlamaConfig) -> None:
    with torch.device("meta"):
        model = KVShiftLlamaForCausalLM(config)
    counted = count_parameters(config)
    embeddings = {id(p): p.numel() for p in (model.model.embed_tokens.weight, model.lm_head.weight)}
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert counted.embedding == sum(embeddings.values())
    assert counted.shift == sum(p.numel() for name, p in model.named_parameters() if ".shift." in name)
    assert counted.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert counted.multiplied == sum(m.weight.numel() for m in linear)


@variants
def test_parameters_are_those_of_the_model(options: dict[str, Any]) -> None:
    check_parameters(KVShiftLlamaConfig(**{**TINY, **options}))


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_the_papers_sizes(name: str) -> None:
    check_parameters(size_config(name))


@variants
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_flops_are_those_that_torch_counts(options: dict[str, Any], checkpointing: bool) -> None:
    """The numbers are exactly equal. Torch counts matrix products, including those of eager attention, for all keys."""
    model = tiny(checkpointing, **options)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as rotary:  # transformers 5.16 multiplies positions and frequencies as matrices
        model.model.rotary_emb(torch.zeros(1), torch.arange(TOKENS).unsqueeze(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids(), labels=ids()).loss.backward()
    expected = training_flops(model.config, TOKENS, causal=False)
    per_token = expected.matrices + expected.attention + (expected.recomputed if checkpointing else 0)
    assert counter.get_total_flops() - rotary.get_total_flops() == per_token * ROWS * TOKENS


@pytest.mark.parametrize(("window", "keys"), [(None, [1, 2, 3, 4, 5]), (3, [1, 2, 3, 3, 3]), (5, [1, 2, 3, 4, 5])])
def test_causal_attention_counts_the_keys_a_query_sees(window: int | None, keys: list[int]) -> None:
    config = KVShiftLlamaConfig(**TINY, sliding_window=window)
    attention = training_flops(config, len(keys)).attention
    assert attention == pytest.approx(12 * 3 * 6 * 10 * sum(keys) / len(keys), rel=1e-12)


def test_flops_of_the_shift_by_hand() -> None:
    """Window 2 takes 3 forward (two products, a sum), 3 for the input, 4 for the coefficients; G * D = 30 elements."""
    assert training_flops(KVShiftLlamaConfig(**TINY), 7).shift == 3 * (3 + 3 + 4) * (30 + 30)
    assert training_flops(KVShiftLlamaConfig(**TINY, shift_targets=()), 7).shift == 0


def kept_bytes(model: KVShiftLlamaForCausalLM, rows: int, precision: str) -> int:
    """Return the bytes that autograd holds after a forward pass: each storage once, without parameters."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            storages[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        loss = model(input_ids=ids(rows), labels=ids(rows), use_cache=False).loss
    kept = sum(storage.nbytes() for storage in storages.values())
    del loss
    return kept


@covering(options=VARIANTS, precision=["fp32", "bf16"], checkpointing={"": False, "checkpointing": True})
def test_activations_are_those_that_autograd_keeps(
    options: dict[str, Any], precision: Any, checkpointing: bool
) -> None:
    """They agree within 1 %. The difference of two batch sizes cancels the copies of weights."""
    model = tiny(checkpointing, **options)
    measured = kept_bytes(model, 9, precision) - kept_bytes(model, 2, precision)
    few, many = (
        training_memory(
            model.config,
            rows=rows,
            sequence_length=TOKENS,
            precision=precision,
            gradient_checkpointing=checkpointing,
        ).kept
        for rows in (2, 9)
    )
    log_probabilities = 4 * 7 * TOKENS * TINY["vocab_size"]  # the formula counts them with the other logits
    assert many - few + log_probabilities == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bfloat16_copies_of_the_weights_are_kept_once(precision: Any) -> None:
    model = tiny()
    memory = training_memory(model.config, rows=1, sequence_length=TOKENS, precision=precision)
    log_probabilities = 4 * TOKENS * TINY["vocab_size"]
    assert memory.kept + memory.copies + log_probabilities == pytest.approx(kept_bytes(model, 1, precision), rel=0.01)


def busiest(model: KVShiftLlamaForCausalLM, rows: int, precision: str) -> int:
    """Return the peak bytes by torch's tracker, while a second batch adds to the gradients of a first."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model)
    batch = ids(rows) % model.config.vocab_size
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


BUSIEST = {
    "logits": ({"vocab_size": 3011}, 5, 0.01),
    "layer": ({"vocab_size": 53, "intermediate_size": 499}, 5, 0.02),
    "weights": ({"hidden_size": 210, "head_dim": 36, "intermediate_size": 499}, 1, 0.02),
}


@covering(busy=BUSIEST, precision=["fp32", "bf16"], checkpointing={"": False, "checkpointing": True})
def test_busiest_moment_of_a_step(busy: tuple[dict[str, Any], int, float], precision: Any, checkpointing: bool) -> None:
    """The largest is the logits, a layer, or the weights and autocast's copies of them."""
    shape, rows, tolerance = busy
    model = tiny(checkpointing, **shape)
    expected = training_memory(
        model.config,
        rows=rows,
        sequence_length=TOKENS,
        precision=precision,
        gradient_checkpointing=checkpointing,
    )
    assert expected.total - expected.optimizer == pytest.approx(busiest(model, rows, precision), rel=tolerance)


def test_the_page_has_these_numbers() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "B | " in line]
    assert [row[0] for row in rows] == list(SIZES)
    for size, parameters, shift, length, gflop, batch, *memory in rows:
        config = size_config(size)
        counted = count_parameters(config)
        assert (parameters, shift) == (f"{counted.total / 1e6:,.0f}", f"{counted.shift:,}")
        tokens = config.max_position_embeddings
        assert (length, gflop) == (f"{tokens:,}", f"{training_flops(config, tokens).model / 1e9:.3g}")
        at_peak = training_memory(
            config,
            rows=int(batch),
            sequence_length=tokens,
            gradient_checkpointing=True,
            sharding="fsdp",
            devices=8,
        )
        stored = at_peak.weights + at_peak.gradients + at_peak.optimizer + at_peak.copies
        assert memory == [f"{x / 2**30:.1f}" for x in (stored, at_peak.kept, at_peak.working, at_peak.total)]
