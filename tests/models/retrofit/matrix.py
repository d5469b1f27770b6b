"""The table of what holds for every family: a check for each column, and the cells that are refused instead.

    python -m tests.models.retrofit.matrix [--check]

writes the table into `docs/retrofit.md`; with --check, it only fails if the page has a different table.
`test_matrix.py` runs each cell. Cells are compared with `truth_of`: transformers' own model in which loops shift the
results of the projections, for each sequence alone and without a cache.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from kvshift.models.retrofit import add_kv_shift, load_kv_shift
from kvshift.models.versions import CACHE

from ...byte_tokenizer import byte_tokenizer
from ..llama import checks as shared
from ..llama.checks import logits_of, new_tokens_of
from ..llama.tiny import draw_adapter, left_padded, random_tokens
from ..registry import CHECKPOINTING
from .tiny_families import FAMILIES, shifted, stock, truth_of

PAGE = Path(__file__).parents[3] / "docs" / "retrofit.md"
ATOL = 3e-5  # rotary tables and norms are float32 even in a float64 model; logits are of size 3 to 17


@cache
def model_of(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model with shift, and the truth about it."""
    model = shifted(family)
    return model, shared.truth_about(model)


def prompts_of(lengths: Sequence[int]) -> list[Tensor]:
    return [random_tokens(length, seed=length) for length in lengths]


def assert_alone(truth: PreTrainedModel, prompts: Sequence[Tensor], generated: Tensor, **options: Any) -> None:
    """Check that each prompt got the tokens that the truth gives it alone: greedily, the likeliest ones."""
    each = options.get("num_return_sequences", 1)
    for i, prompt in enumerate(prompts):
        got = generated[i * each : (i + 1) * each]
        if options:
            how = {"max_new_tokens": generated.shape[1], "use_cache": False, **options}
            expected = new_tokens_of(truth, prompt.unsqueeze(0), **how)
        else:
            row = torch.cat([prompt.unsqueeze(0), got], dim=1)
            expected = logits_of(truth, row, use_cache=False)[:, len(prompt) - 1 : -1].argmax(2)
        assert torch.equal(got, expected), f"prompt of {len(prompt)}: {got.tolist()}, truth {expected.tolist()}"


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def check_identity(family: str) -> None:
    for attention in ("eager", "sdpa"):
        model = stock(family, attention=attention)
        ids, mask = left_padded(prompts_of((4, 9)))
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        before = model.generate(ids, **options)
        after = add_kv_shift(model).generate(ids, **options)
        assert torch.equal(after.sequences, before.sequences)
        assert all(torch.equal(new, old) for new, old in zip(after.logits, before.logits, strict=True))


def check_beam(family: str) -> None:
    model, truth = model_of(family)
    prompts = prompts_of((3, 9))
    ids, mask = left_padded(prompts)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert_alone(truth, prompts, new_tokens_of(model, ids, mask, max_new_tokens=6, **beams), **beams)


def check_sampled(family: str) -> None:
    model, truth = model_of(family)
    prompt, drawn = random_tokens(1, 9), []
    for seed in range(3):
        torch.manual_seed(seed)
        drawn.append(new_tokens_of(model, prompt, do_sample=True, temperature=1.5))
        torch.manual_seed(seed)
        assert_alone(truth, [prompt[0]], drawn[-1], do_sample=True, temperature=1.5)
    assert not torch.equal(drawn[0], drawn[1])


def check_compiled(family: str) -> None:
    """Whole sequences, packed ones, and decoding with a static cache compile to one graph each."""
    torch._dynamo.reset()
    model, truth = model_of(family)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = random_tokens(2, 9)
    assert_close(logits_of(compiled, ids, use_cache=False), logits_of(truth, ids))
    documents = prompts_of((5, 4))
    positions = torch.cat([torch.arange(5), torch.arange(4)]).unsqueeze(0)
    packed = logits_of(compiled, torch.cat(documents).unsqueeze(0), position_ids=positions, use_cache=False)
    for document, got in zip(documents, packed[0].split([5, 4]), strict=True):
        assert_close(got, logits_of(truth, document.unsqueeze(0))[0])
    store = StaticCache(config=model.config, max_cache_len=16)
    logits_of(model, ids[:, :6], **{CACHE: store})
    for t in range(6, 9):
        got = logits_of(compiled, ids[:, t : t + 1], **{CACHE: store})
        assert_close(got[:, -1], logits_of(truth, ids[:, : t + 1])[:, -1])


def check_pairs(family: str) -> None:
    """A mask of four dimensions keeps documents apart and hides padding; a cache continues the last document."""
    model, truth = model_of(family)
    has_window = any("sliding" in layer_type for layer_type in model.config.layer_types)
    rows = [prompts_of((4, 1, 5, 2)), prompts_of((2, 5, 1, 4))]  # none exceeds a window, which such masks lack
    documents = [torch.repeat_interleave(torch.arange(4), torch.tensor([*map(len, row)])).tolist() for row in rows]
    # Padding is -1: one pad on the left, two within the last document.
    numbers = torch.tensor([[-1, *row[:11], -1, -1, *row[11:]] for row in documents])
    ids, positions = torch.ones_like(numbers), torch.zeros_like(numbers)
    for i, row in enumerate(rows):
        for number, document in enumerate(row):
            ids[i, numbers[i] == number] = document
            positions[i, numbers[i] == number] = torch.arange(len(document))
    sees = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None] & torch.ones(15, 15).tril().bool()
    added = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, torch.finfo(torch.float64).min)
    for mask in (sees[:, None], added[:, None].expand(-1, 4, -1, -1)):
        for split, begin in ((15, 0), (10, 0), (11, 1)):  # the first row: no call may begin a document
            store = DynamicCache(config=model.config) if split < 15 else None
            pieces = [slice(0, split), slice(split, 15)][: 1 + (split < 15)]
            results: list[Tensor] = []
            for at in pieces:
                given = {"attention_mask": mask[begin:, :, at, : at.stop], "position_ids": positions[begin:, at]}
                if split < 15:
                    given |= {CACHE: store, "use_cache": True}
                if has_window and at.start:
                    with pytest.raises(ValueError, match="a layer with a sliding window keeps no earlier ones"):
                        model(ids[begin:, at], **given)
                else:
                    results.append(logits_of(model, ids[begin:, at], **given))
            for row, of_row, got in zip(rows[begin:], numbers[begin:], torch.cat(results, dim=1), strict=True):
                for number, document in enumerate(row):
                    part = got[of_row[: len(got)] == number]
                    assert_close(part, logits_of(truth, document[None])[0, : len(part)])


def check_gaps(family: str, *, use_cache: bool) -> None:
    """Shift, attention and window skip padding anywhere in a row, also within one of several documents."""
    model, truth = model_of(family)
    rows = [prompts_of(lengths) for lengths in ((11,), (6, 5), (1, 7, 3))]
    masks = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 11 + [0] * 3, [0, 1, 0, 1, 1, 0] + [1] * 8])
    ids, positions = torch.ones_like(masks), torch.zeros_like(masks)
    for i, row in enumerate(rows):
        ids[i, masks[i] == 1] = torch.cat(row)
        positions[i, masks[i] == 1] = torch.cat([torch.arange(len(document)) for document in row])
    for count in (1, 3):
        given = {"attention_mask": masks[:count], "position_ids": positions[:count]}
        result = model(ids[:count], **given, use_cache=use_cache)
        for row, mask, got in zip(rows, masks, result.logits.detach(), strict=False):
            for document, part in zip(row, got[mask == 1].split([*map(len, row)]), strict=True):
                assert_close(part, logits_of(truth, document[None])[0])
        if use_cache:
            token, next_positions = random_tokens(count, 1, seed=9), [[len(row[-1])] for row in rows[:count]]
            given = {"attention_mask": torch.cat([masks[:count], torch.ones_like(token)], dim=1)}
            given |= {"position_ids": torch.tensor(next_positions), CACHE: result.past_key_values}
            for row, one, got in zip(rows, token, logits_of(model, token, **given), strict=False):
                assert_close(got[-1], logits_of(truth, torch.cat([row[-1], one])[None])[0, -1])


def check_second_derivative(family: str) -> None:
    """Check the gradient of a gradient penalty with respect to the embedding, and to a matrix of the last layer."""
    ids = random_tokens(2, 7)
    results = []
    for model in model_of(family):
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")  # the others have no second derivative
        matrix = next(p for name, p in reversed([*model.named_parameters()]) if p.ndim == 2 and "head" not in name)
        for tensor in (model.get_input_embeddings().weight, matrix):
            (first,) = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, tensor, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), tensor)[0])
        model.set_attn_implementation(attention)
    for got, expected in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


class _Holder(PreTrainedModel):
    """A user's model that contains another model."""

    _supports_sdpa = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config)
        self.model = model
        self.post_init()


def check_post_init(family: str) -> None:
    """No parameter is initialised again in a model that was given a shift, built with one, or loaded."""
    given = shifted(family)
    built = type(given)(given.config)
    with tempfile.TemporaryDirectory() as folder:
        given.save_pretrained(folder)
        loaded = load_kv_shift(folder)
    for model in (given, built, loaded):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        before = copy.deepcopy(model.state_dict())
        _Holder(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def sft_trainer(model: PreTrainedModel, rows: Sequence[Tensor], folder: str | Path, **options: Any) -> Any:
    """Return TRL's trainer of a model on these rows of tokens."""
    from datasets import Dataset  # imported here, since they take seconds
    from trl import SFTConfig, SFTTrainer

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    options = {"report_to": "none", "bf16": False, "use_cpu": True, CHECKPOINTING: False, **options}
    data = Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})
    return SFTTrainer(model, SFTConfig(str(folder), **options), train_dataset=data, processing_class=tokenizer)


def check_sft_loss(family: str) -> None:
    """TRL's loss of padded rows is the mean over all targets, with each row computed alone."""
    model, truth = shifted(family, torch.float32), model_of(family)[1]
    rows = prompts_of((11, 3, 8, 5))
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft_trainer(model, rows, folder, per_device_train_batch_size=4)
        (batch,) = trainer.get_train_dataloader()
        loss = trainer.compute_loss(trainer.model, dict(batch)).detach()
    of_rows = [
        torch.nn.functional.cross_entropy(logits_of(truth, row[None])[0, :-1], row[1:], reduction="sum") for row in rows
    ]
    expected = sum(of_rows) / sum(len(row) - 1 for row in rows)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def check_lora(family: str) -> None:
    """An adapter is added after the shift or before it, merged or not; the truth has the merged projections."""
    prompts = prompts_of((3, 9))
    ids, mask = left_padded(prompts)
    row, merged_logits = random_tokens(1, 11), []
    for before in (False, True):
        if before:
            adapted = _with_adapter(stock(family, torch.float64))
            add_kv_shift(adapted.get_base_model())
            adapted.load_state_dict(_coefficients(model_of(family)[0], adapted), strict=False)
        else:
            adapted = _with_adapter(shifted(family))
        logits, generated = logits_of(adapted, row), new_tokens_of(adapted, ids, mask)
        assert (logits - logits_of(model_of(family)[0], row)).abs().max() > 0.1  # the adapter does something
        model = adapted.merge_and_unload()
        truth = truth_of(model)
        assert_close(logits, logits_of(truth, row))
        assert_close(logits_of(model, row), logits_of(truth, row))
        assert_alone(truth, prompts, generated)
        assert_alone(truth, prompts, new_tokens_of(model, ids, mask))
        merged_logits.append(logits)
    assert_close(*merged_logits)


def _with_adapter(model: PreTrainedModel) -> PeftModel:
    is_gpt2 = "gpt2" in model.config.model_type  # its matrices are stored as (in, out)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", fan_in_fan_out=is_gpt2))
    draw_adapter(adapted, 0.2)
    return adapted.eval()


def _coefficients(model: PreTrainedModel, adapted: PeftModel) -> dict[str, Tensor]:
    prefix = "base_model.model."
    assert isinstance(adapted, PeftModel)
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items() if ".shift." in name}


def check_saved(family: str) -> None:
    model, truth = model_of(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(loaded) is type(model)
    prompts = prompts_of((3, 9))
    ids, mask = left_padded(prompts)
    loaded.generation_config = model.generation_config
    assert_alone(truth, prompts, new_tokens_of(loaded, ids, mask))


def on_model(*checks: Callable[[PreTrainedModel], None]) -> Callable[[str], None]:
    """Return a check that runs the checks for all models with the truth as the reference."""

    def check(family: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "REFERENCES", {})
            for one in checks:
                one(model_of(family)[0])

    return check


CELLS: dict[str, Callable[[str], None]] = {
    "identity": check_identity,
    "greedy": on_model(shared.check_decoding),
    "beam": check_beam,
    "sampled": check_sampled,
    "left-padded": on_model(shared.check_left_padding),
    "assisted": on_model(shared.check_prompt_lookup, shared.check_assistant),
    "static cache": on_model(
        partial(shared.check_left_padding, cache_implementation="static"), shared.check_static_cache_in_pieces
    ),
    "compiled": check_compiled,
    "packed": on_model(shared.check_documents, shared.check_documents_continued, shared.check_documents_generated),
    "4-D mask": check_pairs,
    "padding inside": partial(check_gaps, use_cache=False),
    "padding inside, cached": partial(check_gaps, use_cache=True),
    "chunked prefill": on_model(
        shared.check_chunked_prefill, partial(shared.check_chunked_prefill, cache_implementation="static")
    ),
    "LoRA": check_lora,
    "save, load": check_saved,
    "post_init": check_post_init,
    "second derivative": check_second_derivative,
    "SFT loss (TRL)": check_sft_loss,
}
SLOW = ("compiled",)
# (family, cell): the error message that gives the reason.
REFUSED: dict[tuple[str, str], str] = {}


def table() -> str:
    """Return the Markdown table: "=" for cells that equal their truth, "refused" for cells that are refused by name."""
    lines = ["| | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|"]
    for family in FAMILIES:
        cells = ("refused" if (family, cell) in REFUSED else "=" for cell in CELLS)
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the text of the page with the current table between its two marks."""
    begin, end = "<!-- matrix -->\n", "<!-- end of matrix -->"
    before, _, rest = text.partition(begin)
    assert end in rest, f"{PAGE} has no marks {begin.strip()} and {end}"
    return before + begin + table() + end + rest.partition(end)[2]


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == old else f"{PAGE} is stale: run python -m tests.models.retrofit.matrix")
    PAGE.write_text(new, encoding="utf-8")
