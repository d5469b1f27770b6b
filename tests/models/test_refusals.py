"""Calls that cannot be right are refused before they begin, with the reason."""

import peft
import pytest
import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from kvshift.models.documents import create_masks
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM, KVShiftLlamaModel, ensure_shift_cache
from kvshift.models.versions import CACHE

from .llama.checks import logits_of, new_tokens_of
from .llama.tiny import SIZES, left_padded, random_tokens, right_padded, tiny_model
from .registry import MODELS, RETROFITTED
from .retrofit.tiny_families import stock


@pytest.fixture
def model(request):
    return MODELS[getattr(request, "param", "Llama")]()


both = pytest.mark.parametrize("model", ["Llama", "GPT-2"], indirect=True)


@pytest.fixture
def no_forward(model, monkeypatch):
    """Fail the test if the model runs."""

    def forward(*args, **kwargs):
        raise AssertionError("refused too late: the model ran")

    monkeypatch.setattr(type(model.base_model), "forward", forward)


@both
def test_a_cache_that_holds_tokens_of_the_plain_model(model):
    plain = stock("GPT-2") if "gpt2" in model.config.model_type else LlamaForCausalLM(LlamaConfig(**SIZES))
    cache = plain(random_tokens(1, 5)).past_key_values
    with pytest.raises(ValueError, match=r"already holds tokens, but not their raw keys and values"):
        model(random_tokens(1, 1), **{CACHE: cache})
    with pytest.raises(ValueError, match=r"already holds tokens"):
        new_tokens_of(model, random_tokens(1, 6), **{CACHE: cache})


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # PEFT uses the earlier name
@pytest.mark.parametrize("name", [name for name in {**MODELS, **RETROFITTED} if "no shift" not in name])
def test_prefix_tuning(name: str):
    """Its prefix is a cache of keys and values that were never shifted."""
    config = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    prefixed = peft.get_peft_model({**MODELS, **RETROFITTED}[name](torch.float32), config)
    ids = random_tokens(1, 6)
    message = "prefix tuning gives such a cache: use prompt tuning or LoRA in its place"
    for call in (
        lambda: prefixed(ids),
        lambda: prefixed(ids, labels=ids),
        lambda: prefixed.generate(input_ids=ids, max_new_tokens=3, use_cache=False),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("has_shift", [False, True], ids=["plain", "with shift"])
def test_a_cache_of_the_wrong_number_of_layers(model, layers: int, has_shift: bool):
    config = KVShiftLlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=8)):
        if has_shift:
            ensure_shift_cache(cache, config)
        with pytest.raises(ValueError, match=f"{CACHE} has {layers} layers, this model has 2"):
            model(random_tokens(1, 5), **{CACHE: cache})


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"shift_window": 3}, {}, "made for shift_window=3, this model has shift_window=2"),
        ({"shift_targets": []}, {}, "made for a model without shift, this model has shift_window=2"),
        ({}, {"shift_targets": ["q", "k"]}, "state holds no queries"),
    ],
    ids=["window", "no shift", "queries"],
)
def test_a_cache_of_another_shift(theirs: dict, ours: dict, message: str):
    cache = DynamicCache()
    logits_of(tiny_model(**theirs), random_tokens(1, 5), **{CACHE: cache})
    with pytest.raises(ValueError, match=message):
        tiny_model(**ours)(random_tokens(1, 1), **{CACHE: cache})


class QuantizedToItself(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantized(layers: list[QuantizedLayer]) -> Cache:
    cache = object.__new__(QuantizedCache)  # no backend for its layers needs to be installed
    Cache.__init__(cache, layers=layers)
    return cache


def with_layers(cache: Cache, layers: list[QuantizedLayer]) -> Cache:
    cache.layers = layers
    return cache


CACHES = {
    "offloaded": (lambda config: DynamicCache(config=config, offloading=True), "offloaded to the CPU"),
    "quantized": (lambda config: quantized([]), "is a QuantizedCache"),
    "quantized layers": (
        lambda config: with_layers(DynamicCache(config=config), [QuantizedToItself(), QuantizedToItself()]),
        "has a QuantizedToItself, which cannot carry raw keys and values",
    ),
}


@both
@pytest.mark.parametrize(("make", "message"), CACHES.values(), ids=CACHES)
def test_caches_that_cannot_carry_what_is_shifted(model, make, message: str):
    with pytest.raises(ValueError, match=f"{CACHE} .*{message}"):
        model(random_tokens(1, 5), **{CACHE: make(model.config)})


CONTINUOUS = "continuous batching .* does not carry the raw keys"
GENERATION = {
    **{
        kind: (
            lambda model, ids, kind=kind: new_tokens_of(model, ids, cache_implementation=kind),
            f"cache_implementation cannot be '{kind}': such a cache has no place for the raw keys and values",
        )
        for kind in ("offloaded", "offloaded_static", "quantized")
    },
    "offloaded, given": (
        lambda model, ids: new_tokens_of(model, ids, **{CACHE: DynamicCache(config=model.config, offloading=True)}),
        "offloaded to the CPU",
    ),
    "paged": (lambda model, ids: model.generate(ids, cache_implementation="paged"), CONTINUOUS),
    "generate_batch": (lambda model, ids: model.generate_batch(ids.tolist()), CONTINUOUS),
    "init_continuous_batching": (lambda model, ids: model.init_continuous_batching(), CONTINUOUS),
    "context manager": (lambda model, ids: model.continuous_batching_context_manager(), CONTINUOUS),
}


@both
@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(("begin", "message"), GENERATION.values(), ids=GENERATION)
def test_generation_with_such_a_cache_does_not_begin(model, begin, message: str):
    with pytest.raises(NotImplementedError if message == CONTINUOUS else ValueError, match=message):
        begin(model, random_tokens(1, 5))


@both
@pytest.mark.parametrize("name", ["vllm", "paged|sdpa", "paged|eager", "paged|kernels-community/attn", "tgi"])
def test_attention_of_servers(model, name: str):
    model.config._attn_implementation_internal = name
    with pytest.raises(ValueError, match=r"attn_implementation must be one of eager, sdpa, .* got"):
        model(random_tokens(1, 5))


@both
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "flash_attention_2", "kernels-community/attn"])
def test_attention_of_transformers_is_not_refused(model, name: str):
    model.config._attn_implementation_internal = name
    model.base_model._refuse_unknown_attention()


def recording_cache(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    ensure_shift_cache(cache, model.config)
    cache.activate_past_recording()
    return cache


@both
def test_a_recording_cache_refuses_padding_behind_a_token(model):
    """`crop` counts positions, so it would take back padding instead of tokens."""
    ids, mask = right_padded([random_tokens(3), random_tokens(7)])
    with pytest.raises(ValueError, match=r"attention_mask must be padded on the left .* padding after a token"):
        model(ids, attention_mask=mask, **{CACHE: recording_cache(model)})
    cache = recording_cache(model)
    model(random_tokens(2, 4), **{CACHE: cache})
    ids, mask = left_padded([random_tokens(3), random_tokens(7)])
    mask = torch.cat([torch.ones(2, 4, dtype=mask.dtype), mask], dim=1)  # after tokens of the previous turn
    with pytest.raises(ValueError, match=r"padding after a token"):
        model(ids, attention_mask=mask, **{CACHE: cache})


@both
def test_a_recording_cache_refuses_packed_documents(model):
    for inputs in ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]])}):
        with pytest.raises(ValueError, match=r"cannot hold several documents in a row"):
            model(random_tokens(1, 5), **{CACHE: recording_cache(model)}, **inputs)


BATCH = {"input_ids": random_tokens(2, 5)}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"cu_seq_lens_q": [0, 2, 5]}, TypeError, "cu_seq_lens_q must be a tensor or None, got list"),
        ({"seq_idx": [[0, 0, 1, 1, 1]]}, TypeError, "seq_idx must be a tensor or None, got list"),
        ({"position_ids": [[0, 1, 0, 1, 2]]}, TypeError, "position_ids must be a tensor or None, got list"),
        ({"cu_seq_lens_q": torch.tensor([[0, 2, 5]])}, ValueError, r"must be \(sequences \+ 1,\), got \(1, 3\)"),
        ({"cu_seq_lens_q": torch.tensor([], dtype=torch.long)}, ValueError, r"must be \(sequences \+ 1,\), got \(0,\)"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 2.0, 5.0])}, TypeError, "cu_seq_lens_q must be of dtype torch.int32 or"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 2, 5])}, ValueError, r"decreasing from 0 to 5, .* got \[0, 4, 2, 5\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 99])}, ValueError, r"decreasing from 0 to 5, .* got \[0, 4, 99\]"),
        ({"cu_seq_lens_q": torch.tensor([2, 4, 5])}, ValueError, r"decreasing from 0 to 5, .* got \[2, 4, 5\]"),
        ({"seq_idx": torch.zeros(1, 4).long()}, ValueError, r"seq_idx must be \(1, 5\) like input_ids, got \(1, 4\)"),
        ({"seq_idx": torch.zeros(1, 5)}, TypeError, "seq_idx must be of an integer dtype, got torch.float32"),
        ({"position_ids": torch.arange(4)[None]}, ValueError, r"position_ids must be \(1, 5\) .*, got \(1, 4\)"),
        ({"position_ids": torch.arange(6)[None]}, ValueError, r"position_ids must be \(1, 5\) .*, got \(1, 6\)"),
        ({"position_ids": torch.arange(5)}, ValueError, r"position_ids must be \(1, 5\) .*, got \(5,\)"),
        (BATCH | {"position_ids": torch.arange(5).expand(3, -1)}, ValueError, r"must be \(2, 5\) .*, got \(3, 5\)"),
        (
            BATCH | {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
            ValueError,
            "cu_seq_lens_q needs .* got a batch of 2",
        ),
        ({CACHE: ()}, TypeError, f"{CACHE} must be a Cache of transformers or None, got tuple"),
        ({CACHE: ((torch.zeros(1, 3, 2, 10),) * 2,) * 2}, TypeError, f"{CACHE} must be a Cache .* or None, got tuple"),
    ],
    ids=str,
)
@pytest.mark.parametrize("targets", [["k", "v"], []], ids=str)
def test_malformed_arguments(inputs: dict, error: type[Exception], message: str, targets: list[str]):
    with pytest.raises(error, match=message):
        tiny_model(shift_targets=targets)(**{"input_ids": random_tokens(1, 5), **inputs})


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.usefixtures("no_forward")
def test_documents_that_generation_would_not_carry_on(model, name: str, options: dict):
    named = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1]])}
    with pytest.raises(ValueError, match=f"{name} is an argument of forward.*give position_ids that restart at 0"):
        new_tokens_of(model, random_tokens(1, 5), **{name: named[name]}, **options)


@pytest.mark.usefixtures("no_forward")
def test_documents_in_a_prompt_that_is_fed_in_chunks(model):
    options = {"prefill_chunk_size": 2, "max_new_tokens": 2}
    with pytest.raises(ValueError, match="prefill_chunk_size cannot be used with position_ids that restart"):
        new_tokens_of(model, random_tokens(1, 5), position_ids=RESTART, **options)
    with pytest.raises(AssertionError, match="the model ran"):  # padding does not begin a document
        new_tokens_of(model, *left_padded([random_tokens(5), random_tokens(3)]), **options)


def test_documents_in_a_cache_that_cannot_keep_where_the_last_began():
    model = tiny_model(shift_targets=[])
    cache = DynamicCache(config=model.config, offloading=True)
    with pytest.raises(ValueError, match=f"{CACHE} cannot keep where the last of several documents in a row"):
        model(random_tokens(1, 5), **{CACHE: cache}, position_ids=RESTART)
    cache = LlamaForCausalLM(LlamaConfig(**SIZES))(random_tokens(1, 5)).past_key_values
    model(random_tokens(1, 5), **{CACHE: cache})  # without documents, it accepts what Llama accepts
    with pytest.raises(ValueError, match=f"{CACHE} cannot keep where the last of several documents in a row"):
        model(random_tokens(1, 5), **{CACHE: cache}, position_ids=RESTART)


@pytest.mark.parametrize("sliding", [None, 4])
def test_a_static_cache_within_an_exported_program(sliding: int | None):
    model = tiny_model(sliding_window=sliding)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
    inputs = {"input_ids": random_tokens(1, 1), "cache_position": torch.tensor([0])}
    with pytest.raises(ValueError, match=f"{CACHE} is a static cache in an exported program"):
        torch.export.export(module, (), inputs, strict=False)


def test_a_configuration_of_plain_llama():
    config = LlamaConfig(**SIZES)
    for kind in (KVShiftLlamaForCausalLM, KVShiftLlamaModel):
        with pytest.raises(TypeError, match="config must be a KVShiftLlamaConfig, which says what to shift, got Llama"):
            kind(config)


def test_heads_that_are_rotated_in_part():
    """Stock Llama raises in its first forward pass."""
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0, "partial_rotary_factor": 0.4}
    with pytest.raises(ValueError, match=r"4 of 10 dimensions would be rotated by .*'partial_rotary_factor': 0.4"):
        tiny_model(rope_parameters=rope)
    logits_of(tiny_model(rope_parameters={**rope, "partial_rotary_factor": 1.0}), random_tokens(1, 5))


RESTART = torch.tensor([[0, 1, 0, 1, 2]])


def test_flash_attention_refuses_to_continue_a_pack():
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    model(random_tokens(1, 5), position_ids=RESTART, **{CACHE: cache})
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="and not if a cache continues it"):
        create_masks(model.config, torch.zeros(1, 1, 48), None, cache, torch.tensor([[3]]))
