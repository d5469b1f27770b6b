"""KV shift for models that transformers already has, pretrained or new.

    model = AutoModelForCausalLM.from_pretrained("gpt2")
    add_kv_shift(model)                          # computes what it did before, until its coefficients are trained
    model.save_pretrained("gpt2-with-shift")
    model = load_kv_shift("gpt2-with-shift")

Importing this registers the model types with shift, such as "kvshift_gpt2", with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kvshift.models.retrofit.adding import FAMILIES, add_kv_shift, load_kv_shift
from kvshift.models.retrofit.gpt2 import (
    KVShiftGPT2Config,
    KVShiftGPT2LMHeadModel,
    KVShiftGPT2Model,
)

AutoConfig.register(KVShiftGPT2Config.model_type, KVShiftGPT2Config, exist_ok=True)
AutoModel.register(KVShiftGPT2Config, KVShiftGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(KVShiftGPT2Config, KVShiftGPT2LMHeadModel, exist_ok=True)

__all__ = [
    "FAMILIES",
    "KVShiftGPT2Config",
    "KVShiftGPT2LMHeadModel",
    "KVShiftGPT2Model",
    "add_kv_shift",
    "load_kv_shift",
]
