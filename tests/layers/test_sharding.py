"""Under FSDP2, the coefficients stay separate float32 parameters."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.layers.attention_cases import GQA, B, T, close, make, tokens

# Queries that are not shifted are returned as a view of the projection; nothing modifies them.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def test_a_bfloat16_model_is_sharded_in_two_groups(alone):
    layer = make(GQA, dtype=torch.bfloat16)
    x = tokens(B, T, dtype=torch.bfloat16)
    expected, _ = layer(x)
    fully_shard(layer.shift, mesh=alone, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(layer, mesh=alone)
    out, _ = layer(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert {p.grad.dtype for p in layer.shift.parameters()} == {torch.float32}
    assert set(layer.state_dict()) == set(make(GQA).state_dict())


def test_mixed_precision_of_a_float32_model(alone):
    layer = make(GQA, dtype=torch.float32)
    x = tokens(B, T, dtype=torch.float32)
    expected = layer.bfloat16()(x.bfloat16())[0]
    layer = make(GQA, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer.shift, mesh=alone, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(layer, mesh=alone, mp_policy=policy)
    out, _ = layer(x)
    close(out, expected)
    out.sum().backward()
    assert {p.dtype for p in layer.parameters()} == {p.grad.dtype for p in layer.parameters()} == {torch.float32}
