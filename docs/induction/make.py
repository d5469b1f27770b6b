"""Train the two models of the page that explains KV shift, and draw its picture.

    python docs/induction/make.py      in the root of the repository; some minutes on a CPU

They are the models of one layer of `kvshift reproduce fig01a --preset laptop`, seed 0, each at the learning rate that
was best there. Tokens are letters and digits, so that a reader can type them.

docs/induction/without, docs/induction/with    the models and their tokenizer
docs/figures/induction.svg                     what both answer, drawn from what they compute
"""

from __future__ import annotations

import dataclasses
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvshift_lab.core.messages import log
from kvshift_lab.recipes.fig01a import study
from kvshift_lab.run.callbacks import coefficients
from kvshift_lab.run.head_scores import RepeatConfig, measure_heads, shares
from kvshift_lab.run.loading import load_tokenizer, load_weights
from kvshift_lab.run.train_task import train_task
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.records import read_records

FOLDERS = {"vanilla": "without", "kv-shift": "with"}
RECORDS = Path("results/induction/laptop.jsonl")
HERE = Path("docs/induction")
TEXT = "k d r a b m t e a"

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 370" role="img" aria-labelledby="title">
<title id="title">After k d r a b m t e a, a one-layer model without KV shift does not find what followed the \
first a; with the shift, the key of b also holds a, and the model answers b</title>
<style>
svg {{ --ink: #222; --paper: #fff; --faint: #595959; --block: #f0f0f0; --blue: #0072b2;
  --self: #b3d4e8; --prior: #f3c7a5; }}
@media (prefers-color-scheme: dark) {{
svg {{ --ink: #e6e6e6; --paper: #121212; --faint: #aaa; --block: #2a2a2a; --blue: #6cbcf0;
  --self: #1d4d6b; --prior: #7a4318; }} }}
text {{ fill: var(--ink); font: 16px ui-monospace, monospace; text-anchor: middle; }}
.title {{ font: 600 17px system-ui, sans-serif; text-anchor: start; }}
.note {{ font: 13px system-ui, sans-serif; fill: var(--faint); text-anchor: start; }}
.answer {{ font-size: 24px; font-weight: 700; }}
.paper {{ fill: var(--paper); }}
.box {{ fill: var(--block); }} .self {{ fill: var(--self); }} .prior {{ fill: var(--prior); }}
.query {{ fill: none; stroke: var(--ink); stroke-width: 1.5; }}
.arc {{ fill: none; stroke: var(--blue); stroke-linecap: round; stroke-dasharray: 1; }}
.show, .slide, .draw {{ animation: show .8s both; }}
.slide {{ animation-name: show, slide; }} .draw {{ animation-name: show, draw; }}
@keyframes show {{ from {{ opacity: 0; }} }}
@keyframes slide {{ from {{ transform: translate(-52px, -44px); }} }}
@keyframes draw {{ from {{ stroke-dashoffset: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ * {{ animation: none !important; }} }}
</style>
<rect class="paper" width="720" height="370" rx="6"/>
{rows}</svg>
"""


def letters(lowest_id: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters, with or without spaces between them."""
    known = string.ascii_letters + string.digits + "+/"
    vocabulary = {"<unk>": 0} | {letter: lowest_id + i for i, letter in enumerate(known[: vocab_size - lowest_id])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def best_rate(arm: Arm) -> float:
    """The learning rate of the recorded runs of a model, which the recipe chose."""
    return next(r.options["optimizer"]["learning_rate"] for r in read_records(RECORDS) if r.arm == arm)


def train(variant: str) -> None:
    """Train one model and put it where the page finds it."""
    arm = Arm(variant=variant, layers=1)
    (job,) = (job for job in study.arms("laptop") if job.arm == arm)
    optimizer = dataclasses.replace(job.config.optimizer, learning_rate=best_rate(arm))
    out = Path("build/induction") / FOLDERS[variant]
    result = train_task(dataclasses.replace(job.config, out=out, optimizer=optimizer))
    log(f"{arm}: {result['evaluation']['accuracy']}")
    folder = HERE / FOLDERS[variant]
    shutil.rmtree(folder, ignore_errors=True)
    load_weights(out / "model").save_pretrained(folder)
    letters(job.config.task.lowest_id, job.config.task.vocab_size).save_pretrained(folder)


def shown(variant: str) -> dict[str, Any]:
    """What a model computes on `TEXT`: its answer, and the attention and key of the head with most induction."""
    folder = HERE / FOLDERS[variant]
    tokenizer = load_tokenizer(folder)
    model = load_weights(folder, device="cpu", attn_implementation="eager")
    heads = measure_heads(model, RepeatConfig(rows=4, length=24, lowest_token=11)).heads
    best = max(heads, key=lambda head: head.scores["induction"]).head
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model(ids, output_attentions=True, use_cache=False)
    probability, answer = output.logits[0, -1].softmax(-1).max(-1)
    shift = coefficients(model)
    alpha = shift[0]["alpha"] if shift else None
    return {
        "answer": tokenizer.decode([int(answer)]),
        "probability": float(probability),
        "attention": output.attentions[0][0, best, -1].tolist(),
        "before": float(shares(alpha, len(heads))[best, 1]) if alpha else 0.0,
    }


def picture() -> str:
    """An SVG of both models that moves once: keys are filled, the last token asks, a key answers, its value is said."""
    rows = [
        drawn(shown("vanilla"), "One layer without shift", top=24, delay=5),
        drawn(shown("kv-shift"), "One layer with KV shift", top=206, delay=40),
    ]
    return _SVG.format(rows="".join(rows))


def drawn(found: dict[str, Any], title: str, *, top: int, delay: int) -> str:
    """One model: a row of tokens, below them what their keys hold, above them where the last one looks.

    Args:
        delay: when it begins to move, in tenths of a second.
    """
    letters = TEXT.split()
    place = [150 + 52 * i for i in range(len(letters))]
    last, y = place[-1], top + 72
    parts = [f'<text class="title" x="10" y="{top}">{title}</text>']
    parts += [
        f'<text class="note" x="10" y="{y + 5}">token</text><text class="note" x="10" y="{y + 49}">its key holds</text>'
    ]
    for i, (letter, x) in enumerate(zip(letters, place, strict=True)):
        parts.append(f'<rect class="box" x="{x - 17}" y="{y - 17}" width="34" height="34" rx="3"/>')
        parts.append(f'<text class="letter" x="{x}" y="{y + 6}">{letter}</text>')
        before = found["before"] if i else 0.0
        if before < 0.995:
            wide = 34 * (1 - before)
            parts.append(f'<g class="show" {_after(delay)}>')
            parts.append(f'<rect class="self" x="{x + 17 - wide:.1f}" y="{y + 29}" width="{wide:.1f}" height="30"/>')
            if wide > 9:
                parts.append(f'<text class="letter" x="{x + 17 - wide / 2:.1f}" y="{y + 50}">{letter}</text>')
            parts.append("</g>")
        if before > 0.005:
            wide = 34 * before
            parts.append(f'<g class="slide" {_after(delay + 7)}>')
            parts.append(f'<rect class="prior" x="{x - 17}" y="{y + 29}" width="{wide:.1f}" height="30"/>')
            if wide > 9:
                parts.append(f'<text class="letter" x="{x - 17 + wide / 2:.1f}" y="{y + 50}">{letters[i - 1]}</text>')
            parts.append("</g>")
    parts.append(f'<rect class="query" x="{last - 17}" y="{y - 17}" width="34" height="34" rx="3"/>')
    for x, share in zip(place, found["attention"], strict=True):
        if share >= 0.02:
            high = 18 + 0.08 * (last - x)
            bend = f"C {last} {y - 19 - high:.0f}, {x} {y - 19 - high:.0f}, {x} {y - 19}"
            if x == last:
                bend = "c -14 -24, 14 -24, 8 0"
            start = f"M {last - 4 * (x == last)} {y - 19}"
            parts.append(
                f'<path class="arc draw" {_after(delay + 18)} pathLength="1" d="{start} {bend}" '
                f'stroke-width="{1 + 5 * share:.2f}" stroke-opacity="{0.25 + 0.75 * share:.2f}"/>'
            )
    parts.append(f'<g class="show" {_after(delay + 26)}><text class="letter" x="{last + 42}" y="{y + 6}">→</text>')
    parts.append(f'<text class="answer" x="{last + 76}" y="{y + 7}">{found["answer"]}</text>')
    parts.append(f'<text class="note" x="{last + 64}" y="{y + 28}">{100 * found["probability"]:.0f} %</text></g>')
    return "".join(parts) + "\n"


def _after(tenths: int) -> str:
    return f'style="animation-delay: {tenths / 10}s"'


if __name__ == "__main__":
    if sys.argv[1:] != ["--picture"]:  # of the models that are there
        for name in FOLDERS:
            train(name)
    Path("docs/figures/induction.svg").write_text(picture(), encoding="utf-8")
