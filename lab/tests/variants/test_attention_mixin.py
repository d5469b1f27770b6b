"""Attention that is not Llama's against a slow loop of its formula: whole, in documents, padded, with a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.models.llama import checks
from tests.models.llama.reference import reference_logits
from tests.models.llama.tiny import random_tokens

from . import test_differential as differential
from . import test_mla as mla

# For each form, a function that makes a model, in float64, and the loop.
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{
        f"{name}, {'QK-norm' if qk_norm else 'plain'}": (
            partial(differential.tiny, name, qk_norm),
            differential.by_loop,
        )
        for name, qk_norm in differential.OPTIONS
    },
    **{form: (partial(mla.tiny, form), mla.by_loop) for form in mla.FORMS},
}
every_form = pytest.mark.parametrize("form", FORMS)
with_a_cache = pytest.mark.parametrize(
    "form", [form for form in FORMS if form.endswith(", QK-norm")] + ["mla", "shifted", "shifted, rotated key too"]
)


def made(form: str, **options: Any) -> Any:
    return FORMS[form][0](**options)


@every_form
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_by_the_loop(form: str, attention: str) -> None:
    checks.check_forward(made(form, attention=attention), length=11)


@every_form
def test_documents_and_padding(form: str) -> None:
    model = made(form)
    checks.check_documents(model)
    checks.check_padding_without_positions(model)


CACHE_CHECKS = [
    checks.check_left_padding,
    checks.check_right_padding,
    checks.check_beams,
    checks.check_crop,
    checks.check_selection,
    checks.check_static_cache_in_pieces,
    checks.check_documents_continued,
]


@with_a_cache
@pytest.mark.parametrize("check", CACHE_CHECKS, ids=lambda check: check.__name__)
def test_with_a_cache(check: Callable[[Any], None], form: str) -> None:
    check(made(form))


@every_form
def test_in_every_split(form: str) -> None:
    checks.check_splits(made(form), atol=1e-10)


@every_form
def test_gradients_are_those_of_the_loop(form: str) -> None:
    ids, (make, by_loop), gradients = random_tokens(1, 5), FORMS[form], []

    def by_reference(model: Any) -> Any:
        return reference_logits(dict(model.named_parameters()), model.config, ids[0].tolist(), by_loop)

    for logits in (lambda model: model(ids).logits[0], by_reference):
        model = make()
        logits(model).square().sum().backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in gradients[0].items():  # norms and rotary angles are float32 even in a float64 model
        assert (gradient - gradients[1][key]).abs().max() <= 3e-6 * gradient.abs().max(), key
