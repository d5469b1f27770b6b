"""Prompts from a file and answers into a file: nothing is lost or repeated, and errors name their cause."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.commands.generate.command import GenerateConfig, generate
from kvshift_lab.commands.generate.prompts import open_output, read_prompts
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.files import file_digest

from ...generation_cases import PROMPTS, batch_config, lines, write_prompts

DRAWN = {"temperature": 0.9, "samples": 2}


@pytest.fixture(scope="module")
def answers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = batch_config(model_folder, tmp_path_factory.mktemp("answers"), **DRAWN)
    generate(config)
    return config.output.read_bytes()


@pytest.fixture
def finished(model_folder: Path, tmp_path: Path, answers: bytes) -> tuple[GenerateConfig, bytes]:
    config = batch_config(model_folder, tmp_path, **DRAWN)
    config.output.write_bytes(answers)
    return config, answers


def cuts(content: bytes) -> Iterator[int]:
    """Yield the ends of all lines, and places within every line."""
    end = 0
    yield 0
    for line in content.splitlines(keepends=True):
        yield end + len(line) // 2
        end += len(line)
        yield end - 1
        yield end


@pytest.mark.slow
def test_a_file_that_was_cut_anywhere_ends_as_if_it_had_not_been(finished: tuple[GenerateConfig, bytes]) -> None:
    config, content = finished
    for cut in cuts(content):
        config.output.write_bytes(content[:cut])
        generate(config)
        assert config.output.read_bytes() == content, cut


def test_what_is_there_is_not_computed_again(
    finished: tuple[GenerateConfig, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, content = finished

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished file needs no model")

    monkeypatch.setattr(KVShiftLlamaForCausalLM, "generate", never)
    generate(config)
    assert config.output.read_bytes() == content
    assert "has 8 of 8 lines already" in capsys.readouterr().err


@pytest.mark.slow
def test_kill_and_rerun(model_folder: Path, tmp_path: Path) -> None:
    """A real kill -9 comes while lines are written."""
    prompts = write_prompts(tmp_path, [f"{prompt} {n}" for n in range(10) for prompt in PROMPTS])
    config = batch_config(model_folder, tmp_path, prompts=prompts, max_new_tokens=30, temperature=0.9)
    command = [sys.executable, "-m", "kvshift_lab", "generate", config.model, "--prompts", str(prompts)]
    command += ["--output", str(config.output), "--max-new-tokens", "30", "--temperature", "0.9", "--batch-size", "3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (config.output.exists() and config.output.stat().st_size):
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    partial = config.output.read_bytes()
    assert 0 < partial.count(b"\n") < 40
    generate(config)
    whole = config.output.read_bytes()
    assert whole.startswith(partial[: partial.rfind(b"\n") + 1])
    fresh = dataclasses.replace(config, output=tmp_path / "fresh.jsonl")
    generate(fresh)
    assert fresh.output.read_bytes() == whole


def test_a_greedy_file_continues_with_smaller_batches(model_folder: Path, tmp_path: Path) -> None:
    config = batch_config(model_folder, tmp_path)
    generate(config)
    content = config.output.read_bytes()
    config.output.write_bytes(content[: len(content) // 2])
    generate(dataclasses.replace(config, batch_size=1, seed=5))
    assert config.output.read_bytes() == content


def test_lines_of_another_model_or_other_options_or_prompts_are_not_mixed(
    finished: tuple[GenerateConfig, bytes], tmp_path: Path
) -> None:
    config, content = finished
    copy = shutil.copytree(config.model, tmp_path / "copy")
    generate(dataclasses.replace(config, model=str(copy)))  # the same model in another place
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    stat = (copy / "model.safetensors").stat()
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    os.utime(copy / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    file_digest.cache_clear()  # as in another process
    for change in ({"temperature": 0.8}, {"seed": 1}, {"samples": 1}, {"model": str(copy)}):
        with pytest.raises(LabError, match=r"answers\.jsonl:1 was made by another model or with other options"):
            generate(dataclasses.replace(config, **change))
    write_prompts(tmp_path, [PROMPTS[0], "another", *PROMPTS[2:]])
    with pytest.raises(LabError, match=r"answers\.jsonl:3 belongs to other prompts"):
        generate(config)
    write_prompts(tmp_path, PROMPTS[:3])
    with pytest.raises(LabError, match=r"answers\.jsonl:7 belongs to other prompts"):
        generate(config)
    assert config.output.read_bytes() == content
    config.output.write_bytes(b"something else\n")
    with pytest.raises(LabError, match=r"answers\.jsonl:1 was not written by this command"):
        generate(config)
    assert config.output.read_bytes() == b"something else\n"


def test_two_processes_do_not_write_to_one_file(finished: tuple[GenerateConfig, bytes]) -> None:
    from filelock import FileLock

    config, content = finished
    with (
        FileLock(config.output.with_name(".answers.jsonl.lock")),
        pytest.raises(LabError, match="another process") as e,
    ):
        generate(config)
    assert e.value.exit_code == 4
    assert config.output.read_bytes() == content


@pytest.mark.parametrize(
    "output", ["/proc/answers", "folder", "n" * 253, "file/answers"], ids=["proc", "folder", "long", "in a file"]
)
def test_an_output_that_cannot_be_opened_leaves_nothing(output: str, model_folder: Path, tmp_path: Path) -> None:
    """No lock is left beside it, and the message does not blame another process."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    config = batch_config(model_folder, tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(LabError, match=r"output: .* cannot be written") as e:
        generate(dataclasses.replace(config, output=tmp_path / output))  # an absolute path replaces tmp_path
    assert e.value.exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = batch_config(model_folder, tmp_path)
    syncs = iter([None, OSError(28, "No space left on device")])

    def fsync(_: int) -> None:
        if (problem := next(syncs)) is not None:
            raise problem

    monkeypatch.setattr("kvshift_lab.core.json_lines.os.fsync", fsync)
    with pytest.raises(LabError, match=r"No space left on device; its 3 lines are complete") as error:
        generate(config)
    assert error.value.exit_code == 3
    assert len(lines(config.output)) == 3
    monkeypatch.undo()
    generate(config)
    assert [line["index"] for line in lines(config.output)] == [0, 1, 2, 3]


def test_a_file_that_cannot_be_closed_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.FileIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    path = tmp_path / "answers"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode, buffering: Failing(self, mode))
        with open_output(path, ["a", "b"], 1, "s") as answers:
            answers.append([{"index": 0, "sample": 0, "prompt": "a", "settings": "s"}])
    with open_output(path, ["a", "b"], 1, "s") as answers:
        assert answers.count == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_into_a_device(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is read from the device, and nothing is left beside it."""
    config = batch_config(model_folder, tmp_path)
    generate(dataclasses.replace(config, output=Path("/dev/null")))
    with pytest.raises(LabError, match=r"output: writing to /dev/full failed: .*No space left on device$") as error:
        generate(dataclasses.replace(config, output=Path("/dev/full")))
    assert error.value.exit_code == 3
    assert not [name for name in (".null.lock", ".full.lock") if Path("/dev", name).exists()]
    os.mkfifo(fifo := tmp_path / "fifo")
    reader = threading.Thread(target=lambda: (tmp_path / "copy").write_bytes(fifo.read_bytes()))
    reader.start()
    generate(dataclasses.replace(config, output=fifo))
    reader.join()
    generate(config)
    assert (tmp_path / "copy").read_bytes() == config.output.read_bytes()


def test_prompts_of_a_text_file_are_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffto be\r\n\n \t\nnaïve ".encode())
    assert read_prompts(path) == [("to be", f"{path}:1"), ("naïve ", f"{path}:4")]


def test_blank_lines_of_a_json_file_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": ""}\n\n')
    assert read_prompts(path) == [("a", f"{path}:2"), ("", f"{path}:5")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', r"p\.jsonl:2: not JSON: "),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": "b"\n', r"p\.jsonl:3: not JSON: "),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud83d"}\n', r"p\.jsonl:2 is not UTF-8: .* half a .*, U\+D83D"),
        ("p.jsonl", b"[" * 100_000, r"p\.jsonl:1: not JSON: .*recursion"),
        ("p.txt", b"\n \n", r"p\.txt is empty"),
        ("p.jsonl", b'{"text": "a"}\n', r'p\.jsonl:1: expected an object with a string "prompt", got {"text": "a"}'),
        ("p.jsonl", b'["a"]', r'p\.jsonl:1: expected an object with a string "prompt"'),
        ("p.jsonl", b'{"prompt": 3}', r'p\.jsonl:1: expected an object with a string "prompt"'),
        ("p.txt", b"", r"p\.txt is empty"),
        ("p.txt", b"caf\xe9", r"p\.txt cannot be read: .* position 3"),
        ("p.csv", b"a", r"prompts must be a \.txt file .* or a \.jsonl file .*, got .*p\.csv"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError, match=message):
        read_prompts(tmp_path / name)


def test_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"prompts: .*absent\.txt cannot be read: .*No such file"):
        read_prompts(tmp_path / "absent.txt")
