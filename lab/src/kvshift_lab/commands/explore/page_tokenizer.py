"""Checks that `tokenizer.js` of the page, which reads tokenizer.json, supports a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvshift_lab.core.errors import LabError

_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
_SPLITS = {"Isolated", "Removed"}
# Syntax of Oniguruma that JavaScript does not have or interprets differently.
_FOREIGN = re.compile(r"[?*+]\+|\{\d+(?:,\d*)?\}\+|\(\?(?!i:|!|=|:|<[=!])|\\[hHAzZGRXK]|\[\[:|&&")


def tokenizer_json(tokenizer: Any, name: str) -> str:
    """Return the text of tokenizer.json for the page.

    Raises:
        LabError: The page does not support the tokenizer. The message names the unsupported part.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LabError(f"tokenizer: {name} has a {type(tokenizer).__name__}, which has no tokenizer.json")
    text = backend.to_str()
    found = json.loads(text)
    for what in _unsupported(found):
        raise LabError(
            f"tokenizer: the one of {name} has {what}; the page supports only byte-level BPE (as in GPT-2, Llama 3, "
            "Qwen and `kvshift train`) and word lists"
        )
    return text


def _unsupported(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of the parts of a tokenizer that `tokenizer.js` does not support."""
    model = found["model"]
    kind = model.get("type")
    if kind not in ("BPE", "WordLevel"):
        yield f"a model of the type {kind}"
        return
    for step in _steps(found.get("normalizer"), "normalizers"):
        if step["type"] not in _NORMALIZERS:
            yield f"the normalizer {step['type']}"
    byte_level = False
    for step in _steps(found.get("pre_tokenizer"), "pretokenizers"):
        byte_level |= step["type"] == "ByteLevel"
        yield from _unsupported_split(step)
    for step in _steps(found.get("post_processor"), "processors"):
        if step["type"] not in ("ByteLevel", "TemplateProcessing"):
            yield f"the post-processor {step['type']}"
    for token in found.get("added_tokens", ()):
        if token["single_word"] or (token["normalized"] and found.get("normalizer")):
            yield f"the added token {token['content']!r}, which matches only in normalized text or as a whole word"
    if kind == "BPE":
        if not byte_level:
            yield "a BPE that is not byte-level"
        for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if model.get(option):
                yield f"a BPE with {option}"


def _unsupported_split(step: Mapping[str, Any]) -> Iterator[str]:
    kind = step["type"]
    if kind == "Split":
        if step["behavior"] not in _SPLITS or step["invert"]:
            yield f"a split of behavior {step['behavior']}{', inverted' * step['invert']}"
        pattern = step["pattern"].get("Regex", "")
        if _FOREIGN.search(pattern):
            yield f"the pattern {pattern!r}, which JavaScript interprets differently"
    elif kind not in ("ByteLevel", "Digits", "WhitespaceSplit"):
        yield f"the pre-tokenizer {kind}"


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the steps of a component: the flattened parts of a Sequence, a single step, or none."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[name] for step in _steps(inner, name)]
