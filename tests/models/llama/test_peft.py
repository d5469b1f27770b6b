"""LoRA by PEFT changes the projections, so it is applied before the shift."""

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from kvshift.models.versions import CACHE

from .checks import logits_of, new_tokens_of
from .tiny import draw_adapter, random_tokens, tiny_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def adapted(**options) -> PeftModel:
    """Return a model with a random adapter: PEFT's own initialization changes nothing."""
    model = get_peft_model(tiny_model(shift_window=3), LoraConfig(r=2, target_modules=TARGETS, **options))
    draw_adapter(model, 0.3)
    return model.eval()


def test_coefficients_can_be_trained_beside_the_adapter(tmp_path):
    model, ids = adapted(modules_to_save=["shift"]).train(), random_tokens(2, 9)
    trained = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".shift." in name for name in trained) == 4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert name not in trained or not torch.equal(parameter, trained[name]), name
    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(shift_window=3), tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)
    prompt = random_tokens(1, 5)
    cached, uncached = (new_tokens_of(loaded.double(), prompt, use_cache=use) for use in (True, False))
    torch.testing.assert_close(cached, uncached, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_saved_and_loaded(tmp_path, dtype: torch.dtype):
    model, ids = adapted().to(dtype), random_tokens(1, 9)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    base = tiny_model(dtype, shift_window=3)
    loaded = PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False).to(dtype).eval()
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=0, atol=0)
    assert base.model.layers[0].self_attn.shift.alpha.dtype == torch.float32


@torch.no_grad()
def greedy_after(learned: torch.Tensor, row: torch.Tensor, model: torch.nn.Module, count: int) -> list[int]:
    """Decode after learned embeddings and the tokens of a row, all of it again for every token."""
    tokens = row.tolist()
    for _ in range(count):
        embedded = torch.cat([learned, model.get_input_embeddings()(torch.tensor([tokens]))], dim=1)
        tokens.append(int(model(inputs_embeds=embedded, use_cache=False).logits[0, -1].argmax()))
    return tokens[len(row) :]


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_learned_prompts_are_refused_where_peft_does_not_know_the_cache(config):
    """PEFT 0.21 knows only the name `past_key_values`, which transformers 5.24 has changed."""
    model = get_peft_model(tiny_model(), config(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    message = f"PEFT .* does not fit transformers .*{config.__name__.split('Tuning')[0].upper()}_TUNING"
    if CACHE == "past_key_values":
        message = "raw keys and values|prefix tuning"
    if (config, CACHE) != (PromptTuningConfig, "past_key_values"):
        with pytest.raises(ValueError, match=message):
            model.generate(input_ids=random_tokens(2, 5), max_new_tokens=3)


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
@pytest.mark.parametrize("use_cache", [False] if CACHE == "cache" else [True, False])
def test_a_learned_prompt_comes_once_before_the_text(use_cache):
    torch.manual_seed(0)
    base = tiny_model()
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = random_tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "use_cache": use_cache}
    found = model.generate(input_ids=ids, **options)[:, -6:].tolist()
    assert found == [greedy_after(model.get_prompt(1), row, base, 6) for row in ids]
