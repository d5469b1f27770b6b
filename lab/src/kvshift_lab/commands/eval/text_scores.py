"""`kvshift eval MODEL FILE ...`: loss, perplexity and bits per byte of one or more models on a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from kvshift_lab.analysis.tables import as_text
from kvshift_lab.commands.eval.options import EvalConfig
from kvshift_lab.commands.eval.scoring import BLOCK_BYTES, BlockSums, score, sequences, windows
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.core.statistics import Estimate, mean_of
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.packing import encoder
from kvshift_lab.data.sources import read_text
from kvshift_lab.data.token_stream import token_stream
from kvshift_lab.run.loading import check_tokenizer, load_config, load_tokenizer, load_weights
from kvshift_lab.run.model_files import locate
from kvshift_lab.run.progress import ProgressReporter

_log = partial(log, command="eval")

_LONGEST_WINDOW = 2048  # limit of the default: the logits of longer windows take gigabytes


class Model(NamedTuple):
    """A model whose weights are not loaded yet.

    Attributes:
        begin, separator: Token before each sequence and token between documents; None for no such token.
        longest: Context length (`max_position_embeddings`); None if the config does not state one.
    """

    name: str
    folder: str
    tokenizer: Any
    encode: tokenizers.Tokenizer
    begin: int | None
    separator: int | None
    longest: int | None


def measure(config: EvalConfig) -> dict[str, Any]:
    """Score the text with each model, one after the other, and return the report.

    "models" and "differences" (the first model minus each other model) hold the loss in nats per token and the bits
    per byte, with standard errors over the blocks of the text. "differences" also holds 95 % intervals.

    Raises:
        LabError: The options, text or a model cannot be used (exit code 2), or memory runs out (3).
    """
    models = [prepare(name, config) for name in (config.model, *config.against)]
    length = _window(config, models)
    stride = min(config.stride or length - 1, length)
    text = {"names": list(config.texts), **_measure(config)}
    results = []
    for number, model in enumerate(models):
        label = model.name if len(models) == 1 else f"{model.name} ({number + 1} of {len(models)})"
        results.append(_score(model, config, length, stride, ProgressReporter(label, text["bytes"], "bytes", log=_log)))
    blocks = max(result.sums.shape[1] for result in results)
    for result in results:
        result.extend(blocks)
    tokenizer = [(model.encode.to_str(), model.begin, model.separator) for model in models]
    return {
        "text": text,
        "packing": config.packing,
        "window": length,
        "stride": stride,
        "block_bytes": BLOCK_BYTES,
        "models": [_numbers(model, result) for model, result in zip(models, results, strict=True)],
        "differences": [
            _difference(models[0], results[0], other, result, same_tokens=tokenizer[0] == theirs)
            for other, result, theirs in zip(models[1:], results[1:], tokenizer[1:], strict=True)
        ],
    }


def prepare(name: str, config: EvalConfig) -> Model:
    """Locate a model and load its tokenizer and config, but not its weights."""
    folder, tokenizer_folder = locate(name, _log)
    tokenizer = load_tokenizer(tokenizer_folder)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise LabError(
            f"model: the tokenizer of {name} must be one of the tokenizers library (tokenizer.json), got a "
            f"{type(tokenizer).__name__}"
        )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin = None
    if config.begin == "yes":
        begin = eos if bos is None else bos
        if begin is None:
            raise LabError(f"begin must be auto or no: the tokenizer of {name} has neither a bos nor an eos token")
    elif config.begin == "auto" and bos is not None and tokenizer("")["input_ids"][:1] == [bos]:
        begin = bos
    if config.packing == "concat" and eos is None:
        raise LabError(f"packing must be documents: the tokenizer of {name} has no end-of-text token (eos_token)")
    longest = getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)
    encode = encoder(tokenizer.backend_tokenizer.to_str())
    return Model(name, folder, tokenizer, encode, begin, eos if config.packing == "concat" else None, longest)


def _window(config: EvalConfig, models: list[Model]) -> int:
    """Return the number of tokens per window, which is the same for all models."""
    shortest = min((model for model in models if model.longest), key=lambda model: model.longest or 0, default=None)
    most = None if shortest is None else shortest.longest
    length = config.window
    if length is None:
        length = min(most or _LONGEST_WINDOW, _LONGEST_WINDOW)
    elif most is not None and length > most:
        assert shortest is not None
        raise LabError(f"window must be at most {most}, the longest context of {shortest.name}, got {length}")
    if config.stride is not None and config.stride > length:
        raise LabError(
            f"stride must be at most window ({length}), so that no text is skipped between windows; got {config.stride}"
        )
    return length


def documents(config: EvalConfig) -> Iterator[str]:
    """Iterate over the documents of all texts."""
    shared = {name: getattr(config, name) for name in ("hub_config", "split", "streaming", "text_column")}
    return chain.from_iterable(read_text(DataConfig(corpus=text, **shared), "texts") for text in config.texts)


def _measure(config: EvalConfig) -> dict[str, int | None]:
    """Count the documents and bytes of the text, which also finds unreadable files before hours of work."""
    if config.streaming:  # a second pass would download the text a second time
        return {"documents": None, "bytes": None}
    count = size = 0
    for text in documents(config):
        count += 1
        size += len(text) if text.isascii() else len(text.encode())
    if not count:
        raise LabError(f"texts: {', '.join(config.texts)} contains no text; documents of only whitespace do not count")
    return {"documents": count, "bytes": size}


def _score(model: Model, config: EvalConfig, length: int, stride: int, progress: ProgressReporter) -> BlockSums:
    loaded = load_weights(model.folder, dtype=config.dtype, device=config.device)
    check_tokenizer(model.tokenizer, loaded.get_input_embeddings().num_embeddings)
    parts = sequences(token_stream(documents(config), model.encode), begin=model.begin, separator=model.separator)
    result = BlockSums()
    try:
        for scored in score(loaded, windows(parts, length=length, stride=stride), config.batch_size):
            result.add(scored)
            progress.update(int(scored.sizes.sum()), tokens=len(scored.losses))
    finally:
        progress.close()
    losses, tokens, _ = result.sums.sum(axis=1)
    if not tokens:
        raise LabError(f"texts: there is no token to score for {model.name}: every sequence is a single token")
    if not math.isfinite(losses):
        raise RunFailedError(f"the loss of {model.name} is not finite")
    return result


def _block_values(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return one value per block whose mean and standard error are those of the ratio sum(sums) / sum(weights).

        m = sum(s) / sum(w),  v_i = m + (s_i - m w_i) / mean(w)

    For blocks of equal weight, v_i = s_i / w_i. A block of zero weight carries no information and gets v_i = m.
    """
    mean = sums.sum() / weights.sum()
    return mean + (sums - mean * weights) / weights.mean()


def _numbers(model: Model, result: BlockSums) -> dict[str, Any]:
    losses, tokens, sizes = result.sums[:, result.sums[1] > 0]
    loss = mean_of(_block_values(losses, tokens).tolist())
    perplexity = math.exp(min(loss.mean, 700.0))
    numbers: dict[str, Any] = {
        "name": model.name,
        "source": model.folder,
        "loss": loss.mean,
        "loss_stderr": loss.stderr,
        "perplexity": perplexity,
        "perplexity_stderr": None if loss.stderr is None else perplexity * loss.stderr,
        "bits_per_byte": None,
        "bits_per_byte_stderr": None,
        "tokens": int(tokens.sum()),
        "bytes": int(sizes.sum()),
        "blocks": loss.n,
    }
    if sizes.sum():
        bits = mean_of(_block_values(losses / math.log(2), sizes).tolist())
        numbers |= {"bits_per_byte": bits.mean, "bits_per_byte_stderr": bits.stderr}
    return numbers


def _difference(ours: Model, our: BlockSums, theirs: Model, their: BlockSums, *, same_tokens: bool) -> dict[str, Any]:
    """Return the first model minus the other, paired by block; losses per token only if the tokens are the same."""
    scored = (our.sums[1] > 0) | (their.sums[1] > 0)
    (our_losses, our_tokens, our_sizes), (losses, tokens, sizes) = our.sums[:, scored], their.sums[:, scored]
    found: dict[str, Any] = {"name": ours.name, "minus": theirs.name, "loss": None, "bits_per_byte": None}
    if same_tokens:
        found["loss"] = _paired(_block_values(our_losses, our_tokens) - _block_values(losses, tokens))
    if our_sizes.sum() and sizes.sum():
        bits = _block_values(our_losses, our_sizes) - _block_values(losses, sizes)
        found["bits_per_byte"] = _paired(bits / math.log(2))
    return found


def _paired(values: np.ndarray) -> dict[str, Any]:
    estimate = mean_of(values.tolist())
    return {**with_interval(estimate), "blocks": estimate.n}


def with_interval(estimate: Estimate) -> dict[str, float | None]:
    """Return a difference with its standard error and Student's 95 % interval.

    `estimate` is a mean, or a statistic with a jackknife error. A single value has neither an error nor an interval.
    """
    from scipy.stats import t  # takes half a second to import

    low = high = None
    if estimate.stderr is not None:
        half = float(t.ppf(0.975, estimate.n - 1)) * estimate.stderr
        low, high = estimate.mean - half, estimate.mean + half
    return {"difference": estimate.mean, "stderr": estimate.stderr, "low": low, "high": high}


def table(report: dict[str, Any]) -> list[str]:
    """Format the report for the terminal, as a list of lines."""
    head = ("model", "loss, nats per token", "perplexity", "bits per byte", "tokens", "bytes")
    rows = [
        (
            model["name"],
            _with_error(model["loss"], model["loss_stderr"]),
            _with_error(model["perplexity"], model["perplexity_stderr"], 2),
            _with_error(model["bits_per_byte"], model["bits_per_byte_stderr"]),
            f"{model['tokens']:,}",
            f"{model['bytes']:,}",
        )
        for model in report["models"]
    ]
    lines = [as_text([head, *rows])]
    if report["differences"]:
        head = ("difference", "nats per token", "95 % interval", "bits per byte", "95 % interval")
        rows = [
            (f"{row['name']} minus {row['minus']}", *_interval(row["loss"]), *_interval(row["bits_per_byte"]))
            for row in report["differences"]
        ]
        lines += ["", as_text([head, *rows])]
    count = report["models"][0]["blocks"]
    blocks = "block" if count == 1 else "blocks"
    block = f"documents, or parts of {BLOCK_BYTES} bytes of longer ones"
    packing = "documents scored separately" if report["packing"] == "documents" else "documents concatenated"
    lines += [
        "",
        f"{packing}; windows of {report['window']} tokens, one every {report['stride']}; "
        f"± is one standard error over {count:,} {blocks} of the text ({block})",
    ]
    if any(row["loss"] is None for row in report["differences"]):
        lines.append("Models with different tokenizers are compared only by bits per byte.")
    return lines


def _interval(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    if found["stderr"] is None:
        return f"{found['difference']:+.4f}", "-"
    digits = _digits(found["stderr"])
    return _with_error(found["difference"], found["stderr"], signed="+"), (
        f"{found['low']:+.{digits}f} to {found['high']:+.{digits}f}"
    )


def _with_error(value: float | None, error: float | None, fewest: int = 4, signed: str = "") -> str:
    if value is None:
        return "-"
    if error is None:
        return f"{value:{signed}.{fewest}f}"
    digits = _digits(error, fewest)
    return f"{value:{signed}.{digits}f} ± {error:.{digits}f}"


def _digits(error: float, fewest: int = 4) -> int:
    """Return the number of decimals that shows two significant digits of an error, between `fewest` and 9."""
    return fewest if error <= 0 else min(9, max(fewest, 1 - math.floor(math.log10(error))))
