"""`kvshift export --format mlx`: mlx-lm computes the same as the model, or the model is refused with the reason."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshift_lab.commands.export.command import export
from kvshift_lab.commands.export.comparison import compute
from kvshift_lab.commands.export.mlx_folder import MODEL_FILE, check_mlx, require_mlx_model, write_mlx
from kvshift_lab.commands.export.options import ExportOptions
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.run.loading import load_weights

from ...generation_cases import save_model, tokenizer

needs_mlx = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm and mlx[cpu]")
PROMPTS = [torch.arange(3, 3 + length) for length in (1, 2, 7, 20)]


def saved(folder: Path, **options: Any) -> Path:
    tokenizer().save_pretrained(folder)
    return save_model(folder, **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, **options})


@needs_mlx
@pytest.mark.filterwarnings("default")
def test_mlx_computes_what_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    export(ExportOptions(model=str(saved(tmp_path / "model")), out=tmp_path / "out", format="mlx"))
    assert "in mlx-lm, the greedy tokens equal those of " in capsys.readouterr().err
    assert json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))["model_file"] == MODEL_FILE


@needs_mlx
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{}, {"shift_window": 3, "shift_targets": ("k",), "tie_word_embeddings": True}])
def test_prompts_in_chunks_and_in_batches(options: dict[str, Any], tmp_path: Path):
    """The last raw keys and values are passed from chunk to chunk, and padding is no predecessor."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step
    from mlx_lm.utils import load_model

    model = load_weights(saved(tmp_path / "model", **options))
    expected = compute(model, PROMPTS)
    write_mlx(model, tmp_path / "out")
    check_mlx(tmp_path / "out", PROMPTS, expected)
    loaded, _ = load_model(tmp_path / "out", trust_remote_code=True)
    tokens = [expected[f"{i} tokens"][0, len(prompt) :].tolist() for i, prompt in enumerate(PROMPTS)]
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        steps = generate_step(mx.array(prompt.tolist()), loaded, max_tokens=8, prefill_step_size=3)
        assert [int(token) for token, _ in steps] == answer
    batch = BatchGenerator(loaded, max_tokens=8)
    numbers = batch.insert([prompt.tolist() for prompt in PROMPTS])
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    while any(len(answer) < 8 for answer in answers.values()):
        for response in batch.next_generated():
            answers[response.uid].append(response.token)
    assert [answers[number] for number in numbers] == tokens


@needs_mlx
@pytest.mark.filterwarnings("default")
def test_another_model_in_the_folder_is_found(tmp_path: Path):
    model = load_weights(saved(tmp_path / "model"))
    expected = compute(model, PROMPTS)
    with torch.no_grad():
        model.model.layers[0].self_attn.shift.alpha.mul_(0.5)
    write_mlx(model, tmp_path / "out")
    with pytest.raises(RunFailedError, match="in mlx-lm, "):
        check_mlx(tmp_path / "out", PROMPTS, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift_targets": ("q", "k", "v")}, r"does not support shift_targets \['q', 'k', 'v'\]"),
        ({"shift_constraint": "clamp"}, "does not support shift_constraint clamp"),
        ({"qk_norm": True}, "does not support qk_norm True"),
        ({"sliding_window": 8}, "does not support sliding_window 8"),
    ],
)
def test_what_the_file_does_not_compute_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(LabError, match=message):
        require_mlx_model(load_weights(saved(tmp_path / "model", **options)))
