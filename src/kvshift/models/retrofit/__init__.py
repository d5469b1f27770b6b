"""KV shift for the model classes of transformers, pretrained or newly initialised.

    model = AutoModelForCausalLM.from_pretrained("gpt2")
    add_kv_shift(model)                          # outputs stay the same until the coefficients are trained
    model.save_pretrained("gpt2-with-shift")
    model = load_kv_shift("gpt2-with-shift")

Importing this registers the model types with shift, such as "kvshift_gpt2", with transformers' Auto classes.
"""

from kvshift.models.retrofit.adding import add_kv_shift, load_kv_shift
from kvshift.models.retrofit.families import FAMILIES
from kvshift.models.retrofit.family import register
from kvshift.models.retrofit.gpt2 import (
    KVShiftGPT2Config,
    KVShiftGPT2ForSequenceClassification,
    KVShiftGPT2LMHeadModel,
    KVShiftGPT2Model,
)

for _family in FAMILIES:
    register(_family)

__all__ = [
    "FAMILIES",
    "KVShiftGPT2Config",
    "KVShiftGPT2ForSequenceClassification",
    "KVShiftGPT2LMHeadModel",
    "KVShiftGPT2Model",
    "add_kv_shift",
    "load_kv_shift",
]
