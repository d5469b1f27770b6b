"""transformers' tests of model and configuration classes, on ours."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from . import sources
from .subjects import SUBJECTS, Subject

sources.add_to_path()

from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin, global_rng, ids_tensor  # noqa: E402


class Tester:
    """What transformers' tests read of a model."""

    batch_size = 5
    seq_length = 7
    is_training = True

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        config = subject.config()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> PreTrainedConfig:
        return self.subject.config()

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        """Return a configuration, and rows of different lengths with padding."""
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.ones_like(ids).tril()
        return self.get_config(), {
            "input_ids": ids,
            "attention_mask": mask if self.subject.padding == "right" else mask.flip(1),
        }


class ModelTests(ModelTesterMixin, GenerationTesterMixin):
    """The tests of a model."""

    subject: Subject

    def setUp(self) -> None:
        global_rng.seed(0)
        self.model_tester = Tester(self.subject)


def config_test(step: str) -> Callable[[Any], None]:
    """Return a test that takes one step of transformers' test of a configuration."""

    def run(self: Any) -> None:
        tester = ConfigTester(self, config_class=type(self.subject.config()), **self.subject.fields)
        getattr(tester, step)()

    return run


CONFIG_TESTS = {
    f"test_{step}": config_test(step) for step in vars(ConfigTester) if step.startswith(("create_and_", "check_"))
}


def make_tests(subject: Subject) -> type:
    members = {"subject": subject, "all_model_classes": subject.classes, "__module__": __name__}
    return type("", (ModelTests, unittest.TestCase), CONFIG_TESTS | members)


for name, subject in SUBJECTS.items():
    globals()[name] = make_tests(subject)
