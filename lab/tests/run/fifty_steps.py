"""50 steps of `kvshift train`, which torchtitan repeats elsewhere: the two need different versions of `datasets`.

`python -m lab.tests.run.fifty_steps` rewrites `tests/titan/fifty_steps.json`. `test_fifty_steps.py` checks that
`kvshift train` still gives its contents, and `tests/titan/test_losses.py` that torchtitan gives the same.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import OptimizerConfig
from tests.titan.start_weights import start_weights

from ..run_cases import losses, tiny, write_corpus

RECORDED = Path(__file__).parents[3] / "tests/titan/fifty_steps.json"
STEPS, ROWS, LENGTH = 50, 2, 32
MODEL = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
OPTIMIZER = OptimizerConfig(warmup_steps=0)


class Recorder(TrainerCallback):
    """Replaces the weights of the model by drawn ones, and records its training inputs."""

    def __init__(self) -> None:
        self.model: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert not model.config.tie_word_embeddings
        self.model = {name: getattr(model.config, name) for name in MODEL}
        self.model["rope_theta"] = model.config.rope_parameters["rope_theta"]
        model.load_state_dict(start_weights({name: x.shape for name, x in model.state_dict().items()}))
        model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, model: Any, args: tuple[()], given: dict[str, Any]) -> None:
        if model.training:
            names = ("input_ids", "position_ids", "labels")
            self.steps.append({name: given[name].tolist() for name in names})


def fifty_steps(folder: Path) -> dict[str, Any]:
    """Return the model, the optimizer, and the rows and the loss of each step."""
    config = tiny(
        write_corpus(folder / "words.jsonl"),
        folder / "run",
        data={"packing": "documents", "sequence_length": LENGTH},
        steps=STEPS,
        batch_size=ROWS,
        optimizer=OPTIMIZER,
        eval_every=STEPS,
        save_every=STEPS,
        eval_rows=1,
    )
    recorder = Recorder()
    train(config, [recorder])
    optimizer = {name: getattr(OPTIMIZER, name) for name in ("learning_rate", "weight_decay", "clip_norm")}
    return {"model": recorder.model, "optimizer": optimizer, "steps": recorder.steps, "losses": losses(folder / "run")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = fifty_steps(Path(folder))
    steps = ",\n".join(json.dumps(step, separators=(",", ":")) for step in found.pop("steps"))
    RECORDED.write_text(f'{json.dumps(found)[:-1]}, "steps": [\n{steps}\n]}}\n')


if __name__ == "__main__":
    main()
