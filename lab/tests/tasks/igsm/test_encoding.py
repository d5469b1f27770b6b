"""Tokens of problems: the closed vocabulary of their words, and tokenizers of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.tokenizers import train_bpe
from kvshift_lab.tasks.igsm import IGSMConfig, IGSMTask
from kvshift_lab.tasks.igsm.encoding import Encoder, Layout, make_encoder
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.wording import VOCABULARY, detokenize, spaced

from ..cases import check_shape, seeded
from .reading import drawn, problem_text, solution_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small byte-level BPE, saved by transformers."""
    path = tmp_path_factory.mktemp("bpe")
    texts = (problem_text(problem) + "\n" + solution_text(problem) for problem in problems(300, ops=7))
    train_bpe(texts, 700).save_pretrained(path)
    return path


def problems(count: int, ops: int = 5, seed: int = 0) -> list[Problem]:
    return drawn("kamino", ops, count, seed)


def text_of(encoder: Encoder, ids: list[int]) -> str:
    return encoder.decode(torch.tensor(ids))


@pytest.mark.parametrize("order", ["pq", "qp"])
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_tokens_spell_the_texts(kind: str, order: str, folder: Path):
    encoder = make_encoder("words" if kind == "words" else str(folder), Layout(order))
    found = problems(17, seed=1)
    for problem, encoded in zip(found, encoder.encode(found), strict=True):
        lines = [" ".join(problem.statements), problem.question][:: 1 if order == "pq" else -1]
        prompt = text_of(encoder, encoded.prompt)
        assert spaced(prompt) == " \n ".join(lines) + " \n"
        assert spaced(text_of(encoder, encoded.solution[:-1])) == " \n ".join(problem.solution)
        if kind == "bpe":
            assert prompt == "\n".join(map(detokenize, lines)) + "\n"
            assert text_of(encoder, encoded.solution[:-1]) == solution_text(problem)
        assert encoded.solution[-1] == encoder.end_token
        assert max(encoded.prompt + encoded.solution) < encoder.vocab_size


@pytest.mark.parametrize("kind", ["words", "bpe", "letters"])
def test_values_are_the_results_of_computations(kind: str, folder: Path, tmp_path: Path):
    """In the tokenizer "letters", whose training text has no numbers, a value may take several tokens."""
    train_bpe(iter(["no numbers here"]), 258).save_pretrained(tmp_path)
    encoder = make_encoder({"words": "words", "bpe": str(folder), "letters": str(tmp_path)}[kind], Layout())
    assert encoder.whole_values == (kind != "letters")
    found = problems(29, seed=2)
    for problem, encoded in zip(found, encoder.encode(found), strict=True):
        results = [
            sentence.split()[-2]
            for sentence, computed in zip(problem.solution, problem.computed, strict=True)
            if computed
        ]
        values = [text_of(encoder, [encoded.solution[at]]).strip() for at in encoded.values]
        assert values == results if kind != "letters" else "".join(values) == "".join(results)


def test_values_are_whole_where_those_below_the_modulus_are(tmp_path: Path):
    """In the training text, two digits are never adjacent, so they are not merged."""
    train_bpe(iter(["0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9"]), 268).save_pretrained(tmp_path)
    assert make_encoder(str(tmp_path), Layout(), modulus=10).whole_values
    assert not make_encoder(str(tmp_path), Layout(), modulus=11).whole_values


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_markers_stand_where_ye_et_al_have_them(kind: str, folder: Path):
    encoder = make_encoder("words" if kind == "words" else str(folder), Layout(markers=True))
    (problem,) = problems(1, seed=4)
    (encoded,) = encoder.encode([problem])
    assert [encoded.prompt[0], encoded.prompt[-1]] == ([1, 2] if kind == "words" else [222, 223])
    assert spaced(text_of(encoder, encoded.prompt[1:-1])) == " ".join((*problem.statements, problem.question))
    assert spaced(text_of(encoder, encoded.solution[:-1])) == " ".join(problem.solution)
    assert not {*encoded.prompt[1:-1], *encoded.solution} & {encoded.prompt[0], encoded.prompt[-1]}


def test_markers_that_texts_need_are_refused(tmp_path: Path):
    """In a tokenizer of whole words, the tokens 222 and 223 are text."""
    train_bpe(iter(["Gel Pen"]), 257).save_pretrained(tmp_path / "short")
    make_encoder(str(tmp_path / "short"), Layout(markers=True))
    words = {word: at for at, word in enumerate(["<end>", *VOCABULARY[3:]])}
    save_word_level(words, tmp_path / "words")
    make_encoder(str(tmp_path / "words"), Layout())
    with pytest.raises(LabError, match=r"igsm.markers needs the tokens 222 and 223"):
        make_encoder(str(tmp_path / "words"), Layout(markers=True))


def save_word_level(words: dict[str, int], folder: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(LabError, match=r"tokenizer: cannot load .*nowhere"):
        make_encoder(str(tmp_path / "nowhere"), Layout())


@pytest.mark.parametrize(("generator", "ops"), [("kamino", 20), ("igsm", 9)])
def test_the_vocabulary_has_every_word_of_a_problem(generator: str, ops: int):
    texts = [text for p in drawn(generator, ops, 60) for text in (*p.statements, p.question, *p.solution)]
    assert set(" ".join(texts).split()) <= set(VOCABULARY)


def test_the_vocabulary_has_each_word_once():
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert VOCABULARY[:3] == ("<end>", "<problem>", "<solution>")
    assert {str(number) for number in range(23)} <= set(VOCABULARY)
    assert not any(" " in word for word in VOCABULARY)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("so b = 9 - ( 4 + 3 ) = 2 .", "so b = 9 - (4 + 3) = 2."),
        ("How many Gel Pen does Stationery have ? \n Define", "How many Gel Pen does Stationery have?\nDefine"),
        ("each Red Rock Middle 's Map Hall , and", "each Red Rock Middle's Map Hall, and"),
    ],
)
def test_spaced_and_written_are_inverse(words: str, text: str):
    assert detokenize(words) == text
    assert spaced(text) == words
    assert spaced(words) == words


def test_a_task_with_a_tokenizer_from_a_folder(folder: Path):
    task = IGSMTask(IGSMConfig(ops=4, test_ops=5, length=409, tokenizer=str(folder)))
    batch = task.batch(seeded(13), 5)
    check_shape(task, batch, 5)
    assert task.end_token == 0
    for question in task.questions(seeded(14), 3):
        (encoded,) = task.encoder.encode([question.truth])
        assert question.prompt.tolist() == encoded.prompt
        assert task.judge(question, torch.tensor(encoded.solution[:-1])) == {"paper": True, "strict": True}
    values = batch.slices == 1
    assert all(re.fullmatch(r" ?\d+", task.encoder.decode(token)) for token in batch.input_ids[values])
