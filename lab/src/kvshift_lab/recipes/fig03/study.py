"""Figure 3 and Table 2: the 2.9B and 19B models, whose sharded training step is tried without allocating memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_curves
from kvshift_lab.analysis.colors import GREEN, ORANGE, PURPLE
from kvshift_lab.analysis.panels import LOSS, legend_below, new_figure
from kvshift_lab.recipes.fig03 import ENTRY
from kvshift_lab.recipes.fig03.dry_run import dry_run
from kvshift_lab.recipes.language_models.settings import LARGE, arms_of, loss_claim
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, holds_if
from kvshift_lab.study.cost import count_parameters, training_flops, training_memory
from kvshift_lab.study.jobs import Computation, StudyJob
from kvshift_lab.study.recipe import Recipe, Record, by_arm, curves_by_label, paired_losses
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, VARIANTS, with_variant
from kvshift_lab.variants.model_config import ModelConfig

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A model sharded over as many devices as the paper used.

    Attributes:
        size: name of the model size.
        variant: name of the variant.
        devices: number of processes.
        length: tokens per sequence.
        layers: number of layers; None: all layers of the size.
    """

    size: str
    variant: str
    devices: int
    length: int
    layers: int | None = None


# By preset: size, devices and context length of Table 16, and number of layers.
SHARDED = {
    "smoke": (("0.2B", 8, 64, 1),),
    "laptop": (("2.9B", 512, 4096, None), ("19B", 240, 12_288, None)),
}
_PAPER_SCORES = {"2.9B": (38.57, 36.45), "19B": (38.83, 38.06)}  # Table 2: KV-shift, vanilla
_NOMINAL_BILLIONS = {"0.2B": 0.14, "2.9B": 2.9, "19B": 19.0}  # billions


def try_step(config: Sharded) -> dict[str, Any]:
    """Return the memory of a dry-run step and that by the formulas of `cost.py`, and the training FLOPs per token."""
    options = with_variant(ModelConfig(size=config.size), config.variant)
    model = llama_config(options, vocab_size=1, sequence_length=config.length)
    if config.layers is not None:
        model.num_hidden_layers = config.layers
    planned = training_memory(
        model,
        rows=1,
        sequence_length=config.length,
        precision="bf16",
        gradient_checkpointing=True,
        sharding="fsdp",
        devices=config.devices,
    )
    return {
        **asdict(dry_run(model, devices=config.devices, sequence_length=config.length)),
        "planned": {name: getattr(planned, name) for name in ("weights", "gradients", "optimizer")},
        "counted": count_parameters(model).total,
        "flops_per_token": training_flops(model, config.length).model,
    }


def arms(preset: str) -> list[Computation | StudyJob]:
    """Return the dry runs; for the preset paper, the training runs themselves."""
    if preset == "paper":
        return [arm for size in ("19B", "2.9B") for arm in arms_of(LARGE[size], SHIFTED_AND_VANILLA)]
    return [
        Computation(
            arm=Arm(variant=variant, case=size),
            config=Sharded(size=size, variant=variant, devices=devices, length=length, layers=layers),
            function=try_step,
        )
        for size, devices, length, layers in SHARDED[preset]
        for variant in SHIFTED_AND_VANILLA
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims: for dry runs about sizes and planned memory, for training runs about losses."""
    if any(record.curve for record in records):
        return _trained(records)
    found = []
    for record in records:
        result, options = record.result, record.options
        planned = sum(result["planned"].values())
        share = sum(result[name] for name in result["planned"])
        if options["layers"] is None:
            total = result["parameters"]
            found.append(
                Claim(
                    statement=f"{record.arm}: the configuration of Table 16 has the parameters of its name",
                    paper=f"{options['size']}",
                    ours=f"{total:,}",
                    direction=holds_if(abs(total / 1e9 / _NOMINAL_BILLIONS[options["size"]] - 1) < 0.01),
                    note=f"as counted by formula: {result['counted']:,}",
                    by="arithmetic",
                )
            )
        found.append(
            Claim(
                statement=f"{record.arm}: one of {options['devices']} processes takes a step on fake tensors, in "
                "the weights, gradients and AdamW of the plan to within 5 %",
                paper="trained there",
                ours=f"{share / GIB:.3f} GiB on the first process; activations are not compared",
                direction=holds_if(0.99 < share / planned < 1.05),
                note=f"{planned / GIB:.3f} GiB planned; {result['gathered'] / GIB:.2f} GiB of weights gathered; "
                f"{result['flops_per_token'] / 1e9:.1f} GFLOP for each token",
                own=True,
                by="arithmetic",
            )
        )
    return [
        *found,
        *(_benchmarks(size) for size in dict.fromkeys(r.options["size"] for r in records) if size in _PAPER_SCORES),
    ]


def _benchmarks(size: str) -> Claim:
    """Return the claim of Table 2, the scores after all tokens, which no model that fits a laptop can test."""
    shifted, vanilla = _PAPER_SCORES[size]
    return Claim(
        statement=f"{size}: KV-shift scores higher than vanilla on eight benchmarks",
        paper=f"{shifted:.2f} against {vanilla:.2f}, the mean of eight, one run of each",
        ours="nothing was trained",
        direction="not testable here",
        note="models that fit a laptop answer these benchmarks at chance",
    )


def _trained(records: Sequence[Record]) -> list[Claim]:
    models, found = by_arm(records), []
    shifted, vanilla = (VARIANTS[variant].label for variant in SHIFTED_AND_VANILLA)
    for arm in models:
        if arm.variant == "vanilla":
            continue
        found.append(
            loss_claim(
                paired_losses(models[arm], models[replace(arm, variant="vanilla")]),
                (shifted, vanilla),
                lambda shifted, vanilla: "not shown",
                statement=f"{replace(arm, variant=None)}: {shifted} has a lower loss than {vanilla}",
                paper="lower throughout, without numbers",
                note="one pair of runs decides nothing",
            )
        )
    return found


def plot(records: Sequence[Record]) -> Figure:
    """Plot the memory of a device beside the planned memory for dry runs, or the losses for training runs."""
    if any(record.curve for record in records):
        figure, (axes,) = new_figure(["Training"], ylabels=[LOSS], height=4)
        draw_curves(axes, curves_by_label(records, "loss"))
        legend_below(figure)
        return figure
    figure, (axes,) = new_figure(["A sharded step"], ylabels=["GiB of one device"], height=3.6)
    for at, (kind, color) in enumerate({"weights": GREEN, "gradients": PURPLE, "optimizer": ORANGE}.items()):
        for shift, (name, hatch) in enumerate((("dry run", ""), ("planned", "///"))):
            bytes_of = [(record.result["planned"] if shift else record.result)[kind] for record in records]
            places = [number + 0.13 * (2 * at + shift - 2.5) for number in range(len(records))]
            how = {"label": f"{kind}, {name}", "color": color, "alpha": 1 - 0.5 * shift, "hatch": hatch}
            axes.bar(places, [each / GIB for each in bytes_of], 0.12, **how)
    axes.set_xticks(range(len(records)), [record.arm.label for record in records])
    legend_below(figure)
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="Figure 3 and Table 2",
    arms=arms,
    plot=plot,
    claims=claims,
)
