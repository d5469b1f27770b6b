"""Baichuan-M1, which mixes keys and values with those of the previous token. See docs/baichuan_m1.md.

Importing this registers model type "baichuan_m1" with transformers' Auto classes, unless transformers already has it.
"""

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvshift.models.baichuan_m1.configuration import BaichuanM1Config
from kvshift.models.baichuan_m1.layout import conversions
from kvshift.models.baichuan_m1.modeling import BaichuanM1ForCausalLM, BaichuanM1Model, BaichuanM1PreTrainedModel
from kvshift.models.baichuan_m1.paper import from_paper
from kvshift.models.registration import register_model_type

__all__ = [
    "BaichuanM1Config",
    "BaichuanM1ForCausalLM",
    "BaichuanM1Model",
    "BaichuanM1PreTrainedModel",
    "from_paper",
    "register",
]


def register() -> bool:
    """Register these classes with the Auto classes; return False if transformers already has the model type."""
    name = BaichuanM1Config.model_type
    if name in CONFIG_MAPPING_NAMES:
        return False
    register_checkpoint_conversion_mapping(name, conversions(), overwrite=True)
    one_matrix = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "W_pack")
    register_model_type(BaichuanM1Config, (BaichuanM1Model, BaichuanM1ForCausalLM), like="llama", renamed=one_matrix)
    return True


register()
