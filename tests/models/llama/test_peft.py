"""LoRA by PEFT changes the projections, so it is applied before the shift."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

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
