"""What the configuration of every family promises: unknown fields are seen, and plans name modules that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from kvshift.models.baichuan_m1 import BaichuanM1Config
from kvshift.models.retrofit import FAMILIES as ALL_FAMILIES
from kvshift.models.retrofit import add_kv_shift, load_kv_shift

from .baichuan_m1 import tiny as baichuan_m1
from .llama.tiny import tiny_model
from .registry import MODELS, RETROFITTED
from .retrofit.tiny_families import FAMILIES, stock

MESSAGE = r"unknown configuration field '{}' \(value {}\); known: .*{}"
MISSPELT = {"eos_token_ids": "eos_token_id", "initialiser_range": "initializer_range"}
MISSPELT |= {"shift_windows": "shift_window", "shift_kind": "shift_constraint"}
CLASSES = {family.config.model_type: family.config for family in ALL_FAMILIES} | {"baichuan_m1": BaichuanM1Config}


def saved_fields(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    own = baichuan_m1.CONFIG if config_class is BaichuanM1Config else {}
    return json.loads(config_class(**{k: v for k, v in own.items() if k != "model_type"}).to_json_string())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("field", MISSPELT)
def test_an_unknown_field_near_a_known_one_is_refused_by_constructors_and_warned_of_in_files(tmp_path, name, field):
    config_class, fields = CLASSES[name], saved_fields(CLASSES[name])
    meant = "" if name == "baichuan_m1" and field.startswith("shift") else MISSPELT[field]
    given = {key: value for key, value in fields.items() if key not in ("model_type", "transformers_version")}
    for construct in (config_class, lambda **given: AutoConfig.for_model(name, **given)):
        with pytest.raises(ValueError, match=MESSAGE.format(field, 3, meant)):
            construct(**given, **{field: 3})
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**fields, field: 3}), encoding="utf-8")
    loads = {
        "class": lambda: config_class.from_pretrained(tmp_path),
        "Auto class": lambda: AutoConfig.from_pretrained(tmp_path),
        "file": lambda: config_class.from_json_file(file),
        "dict": lambda: config_class.from_dict({**fields, field: 3}),
        "part of another configuration": lambda: (
            AutoConfig.for_model("llava", text_config={**fields, field: 3}).text_config
        ),
    }
    for load in loads.values():
        with pytest.warns(UserWarning, match=MESSAGE.format(field, 3, meant) + r".*\. It has no effect"):
            loaded = load()
        assert type(loaded) is config_class
        assert getattr(loaded, field) == 3  # kept, as transformers keeps it


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "baichuan_m1"])
@pytest.mark.parametrize("field", ["targets", "window", "constraint", "init"])
def test_the_names_of_shift_options_are_no_fields(name, field):
    with pytest.raises(ValueError, match=MESSAGE.format(field, 3, f"shift_{field}")):
        CLASSES[name](**{field: 3})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_with_such_a_field_is_loaded(tmp_path, family):
    model = add_kv_shift(stock(family, eos_token_ids=[1]))
    model.save_pretrained(tmp_path)
    for load in (load_kv_shift, type(model).from_pretrained, AutoModel.from_pretrained):
        with pytest.warns(UserWarning, match=MESSAGE.format("eos_token_ids", r"\[1\]", "eos_token_id")):
            load(tmp_path)


PLANNED = {
    **MODELS,
    **RETROFITTED,
    "Llama, tied": lambda: tiny_model(tie_word_embeddings=True),
    "Llama, QK-norm": lambda: tiny_model(qk_norm=True),
    "Llama, QK-norm without shift": lambda: tiny_model(qk_norm=True, shift_targets=[]),
    "Llama, gate, keys alone": lambda: tiny_model(shift_constraint="gate", shift_targets=["k"]),
}


@pytest.mark.parametrize("name", PLANNED)
def test_every_pattern_of_the_plans_matches_a_module(name):
    model = PLANNED[name]()
    for owner, plans in (
        (model.base_model, (model.config.base_model_tp_plan, model.config.base_model_pp_plan)),
        (model, (type(model)._tp_plan, type(model)._pp_plan)),
    ):
        names = [name for name, _ in (*owner.named_modules(), *owner.named_parameters())]
        for pattern in (pattern for plan in plans for pattern in plan or {}):
            matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            assert any(matches.fullmatch(name) for name in names), pattern


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_llama_shards_all_of_its_coefficients(name):
    model = MODELS[name]()
    if model.config.model_type == "kvshift_llama":
        own = {re.sub(r"\d+", "*", name) for name, _ in model.base_model.named_parameters() if "shift" in name}
        assert own == {name for name in model.config.base_model_tp_plan if "shift" in name}
