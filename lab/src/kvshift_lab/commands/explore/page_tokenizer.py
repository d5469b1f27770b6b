"""The tokenizer of the page: tokenizer.json, with patterns that JavaScript reads like the library.

Only what is listed here is translated; everything else is refused by name. A sample of texts is encoded by the page
when it opens, and by Node.js, if there is one, when it is written: the ids must be those of the library.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from kvshift_lab.core.errors import LabError, RunFailedError

_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
_SPLITS = {"Isolated", "Removed"}
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split", "WhitespaceSplit"}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A pattern is a sequence of these parts of Oniguruma's syntax, in this order of preference.
_PARTS = re.compile(
    r"(?P<group>\(\?(?:i:|:|!|=)|\((?!\?))"
    r"|(?P<end>\))"
    r"|(?P<or>\|)"
    r"|(?P<times>(?:[?*+]|\{\d+(?:,\d*)?\})(?![+?]))"
    r"|(?P<any>\.)"
    r"|(?P<open>\[\^?)(?P<members>(?:\\.|\\[pP]\{\w+\}|[^\]\[&\\])+)\]"
    r"|(?P<character>\\[pP]\{\w+\}|\\.|[^\\^$.*+?()\[\]{}|])",
    re.DOTALL,
)
_MEMBERS = re.compile(r"\\[pP]\{\w+\}|\\.|.", re.DOTALL)
_CLASSES = {
    r"\s": r"\p{White_Space}", r"\S": r"\P{White_Space}", r"\d": r"\p{Nd}", r"\D": r"\P{Nd}",
    r"\r": r"\r", r"\n": r"\n", r"\t": r"\t",
}  # fmt: skip
_CATEGORIES = re.compile(r"L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?")
_FOLDED = {"s": "ſ", "k": "\u212a"}  # further characters that match an ASCII letter whose case is ignored
_COMPARE = """
import { readFileSync } from "node:fs";
const { Tokenizer, differing } = await import(`${process.cwd()}/tokenizer.js`);
const file = JSON.parse(readFileSync("tokenizer.json"));
const text = differing(new Tokenizer(file), file.sample);
if (text !== undefined) console.log(JSON.stringify(text));
"""
_FOLDED_TOGETHER = re.compile("ss|ff|fi|fl|st", re.IGNORECASE)  # letters that also match one character, such as ß


def tokenizer_json(tokenizer: Any, name: str) -> str:
    """Return the text of tokenizer.json for the page: steps that split have a pattern "JavaScript", and "sample" has
    texts with their ids.

    Raises:
        LabError: The page does not support the tokenizer. The message names the unsupported part.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LabError(f"tokenizer: {name} has a {type(tokenizer).__name__}, which has no tokenizer.json")
    text = backend.to_str()
    found = json.loads(text)
    try:
        for what in _unsupported(found):
            raise ValueError(what)
        for step in _steps(found.get("pre_tokenizer"), "pretokenizers"):
            if step["type"] == "ByteLevel" and step.get("use_regex", True):
                step["JavaScript"] = javascript(_GPT2)
            if "Regex" in step.get("pattern", {}):
                step["JavaScript"] = javascript(step["pattern"]["Regex"])
            elif "String" in step.get("pattern", {}):
                step["JavaScript"] = "".join(map(_literal, step["pattern"]["String"]))
    except ValueError as error:
        raise LabError(
            f"tokenizer: the one of {name} has {error}; the page supports only byte-level BPE (as in GPT-2, Llama 3, "
            "Qwen and `kvshift train`) and word lists"
        ) from error
    found["sample"] = _sample(tokenizer)
    return json.dumps(found, ensure_ascii=False)


def check_in_node(page: Path) -> None:
    """Compare the ids of the page's tokenizer with its sample, if there is Node.js; a browser does so in any case.

    Raises:
        RunFailedError: The page gives other ids. The message has the text.
    """
    node = shutil.which("node")
    if node is None:
        return
    ran = subprocess.run(
        [node, "--no-warnings", "--input-type=module", "-e", _COMPARE], cwd=page, capture_output=True, text=True
    )
    if ran.returncode or ran.stdout.strip():
        what = ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]
        raise RunFailedError(f"tokenizer: the page gives other tokens than the library for the text {what}")


def _sample(tokenizer: Any) -> list[dict[str, Any]]:
    """Return texts with their ids: scripts, spaces, digits and added tokens."""
    texts = [
        "", "To be, or not to be: that's the question.", "IT'S we'LL I'ſ y'all'd", "naïve café cafe\u0301 ﬁ Ⅷ ½ ß",
        "東京タワー 한국어 العربية ١٢٣", "🙂👩\u200d👩\u200d👧", "3.14159 1234567 x=1; (a[0]) {b} _snake_case !? — \\",
        " \t \n\n  \r\n \r\u00a0\u0085\u2028\u2029\ufeff", "    indented\n\tcode  \n", "\x00" + 40 * "a",
    ]  # fmt: skip
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts += [f"one {content} two{content}{content} " for content in added[:50]]
    texts += ["".join(added[:50]), "".join(content[:-1] for content in added[:50])]
    return [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in texts if _encodes(tokenizer, text)]


def _encodes(tokenizer: Any, text: str) -> bool:
    """Return True unless a word list without a token for unknown words lacks one of the text."""
    try:
        tokenizer(text)
    except Exception:  # tokenizers raises plain Exceptions
        return False
    return True


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
        if step["type"] not in _PRE_TOKENIZERS:
            yield f"the pre-tokenizer {step['type']}"
        if step["type"] == "Split" and (step["behavior"] not in _SPLITS or step["invert"]):
            yield f"a split of behavior {step['behavior']}{', inverted' * step['invert']}"
    for step in _steps(found.get("post_processor"), "processors"):
        if step["type"] not in ("ByteLevel", "TemplateProcessing"):
            yield f"the post-processor {step['type']}"
    for token in found.get("added_tokens", ()):
        if token["single_word"] or (token["normalized"] and found.get("normalizer")):
            yield f"the added token {token['content']!r}, which matches only in normalized text or as a whole word"
    first, second = (
        [token["content"] for token in found.get("added_tokens", ()) if token["normalized"] is later]
        for later in (False, True)
    )
    for one, other in product(first, second):  # the library looks for `second` in what `first` leaves
        if _overlap(one, other) or _overlap(other, one):
            yield f"the added tokens {one!r} and {other!r}, which overlap and are matched in two passes"
    if kind == "BPE":
        if not byte_level:
            yield "a BPE that is not byte-level"
        for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if model.get(option):
                yield f"a BPE with {option}"


def _overlap(one: str, other: str) -> bool:
    """Return True if `other` can begin within `one`."""
    return any(one[at:].startswith(other) or other.startswith(one[at:]) for at in range(len(one)))


def javascript(pattern: str) -> str:
    """Translate an Oniguruma pattern to one of JavaScript with the flag u.

    Raises:
        ValueError: The pattern has a part that is not translated. The message names both.
    """
    found: list[str] = []
    shape: list[str] = []  # the pattern with x for every character, and with lookaheads that are always true
    groups: list[bool] = []  # of each open group, whether it ignores case
    at, letters = 0, ""
    while at < len(pattern):
        part = _PARTS.match(pattern, at)
        if part is None:
            raise ValueError(f"the pattern {pattern!r}, of which {pattern[at : at + 8]!r} is not translated")
        at, ignores = part.end(), any(groups)
        try:
            if group := part["group"]:
                groups.append(group == "(?i:")
                found.append("(?:" if group in ("(", "(?i:") else group)
                shape.append("(?:|" if group in ("(?=", "(?!") else "(?:")
            elif part["end"]:
                groups.pop()
                found.append(")")
                shape.append(")")
            elif part["open"]:
                members = _MEMBERS.findall(part["members"])
                if ignores and "-" in members[1:-1]:
                    raise ValueError("ranges")
                found.append(part["open"] + "".join(_member(each, ignores) for each in members) + "]")
            elif character := part["character"]:
                one = "-" if character == r"\-" else _member(character, ignores)  # an escape only within brackets
                found.append(f"[{one}]" if ignores and len(one) > 1 and one[0] != "\\" else one)
            else:
                found.append(r"[^\n]" if part["any"] else part[0])
            if part["or"] or part["times"]:
                shape.append(part[0])
            elif len(shape) < len(found):
                shape.append("x")
            if not (part["group"] or part["end"]):
                letters = letters + part[0] if part["character"] and ignores else ""
            if _FOLDED_TOGETHER.search(letters):
                raise ValueError("letters that match one character together")
        except (ValueError, IndexError) as error:
            raise ValueError(f"the pattern {pattern!r}, of which {part[0]!r} is not translated ({error})") from error
    try:
        is_empty = re.fullmatch("".join(shape), "") is not None
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r}, which is not translated ({error})") from error
    if is_empty:
        raise ValueError(f"the pattern {pattern!r}, which matches nothing at all, too")
    return "".join(found)


def _member(character: str, ignores_case: bool) -> str:
    """Translate a character, an escape or a property, inside brackets or alone."""
    if character in _CLASSES:
        return _CLASSES[character]
    if character[:2].lower() == r"\p":
        if not _CATEGORIES.fullmatch(character[3:-1]):
            raise ValueError("not a general category of Unicode")
        return character
    if character[0] == "\\":
        if character[1].isalnum():
            raise ValueError("an escape")
        return r"\-" if character == r"\-" else _literal(character[1])
    if ignores_case and not character.isascii():  # also one without case, which may match together with a letter
        raise ValueError("case of other letters than A to Z")
    if ignores_case and character.lower() != character.upper():
        lower = character.lower()
        return lower + lower.upper() + _FOLDED.get(lower, "")
    return character if character == "-" else _literal(character)


def _literal(character: str) -> str:
    return "\\" + character if character in r"\^$.*+?()[]{}|/" else character


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a component: the flattened parts of a Sequence, a single step, or none."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[name] for step in _steps(inner, name)]
