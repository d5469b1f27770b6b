"""Every command, example and first page, in an environment with exactly what its page says to install.

    PYTHON lab/tests/environments.py FOLDER

PYTHON is the interpreter of a virtual environment that has pip and torch and nothing else, which `make test-newest`
creates. The environments are made in FOLDER, one for each line of installation: each has the packages of PYTHON, those
of the environment that it extends, and what pip adds for its line, which must be on the page. The first failure ends
the script.

A command must end with 0, or, where its page asks for more than was installed, with 2 and one line that says which
command installs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = "--model.hidden-size 16 --data.vocab-size 300"

PREPARED = (
    f"kvshift train --out runs/mine --steps 4 --data.sequence-length 64 {TINY}",
    f"kvshift train --out runs/other --steps 4 --data.sequence-length 64 --model.variant vanilla {TINY}",
)
"""Runs once, with the lab; later commands use these models."""


@dataclass(frozen=True)
class Environment:
    """What a page says to install, and what must then run.

    Attributes:
        page: the page, which has the line `install`.
        install: the line.
        commands: what must end with 0.
        refused: what must end with 2, by a line that names what the value says.
        extends: the environment, by its line, to which this line adds packages.
    """

    page: str
    install: str
    commands: Sequence[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    extends: str | None = None


OFFLINE = "could not be downloaded"  # what `kvshift explore` says without its files and without a network
LIBRARY, LAB = "pip install .", "pip install . ./lab"
ENVIRONMENTS = (
    Environment(
        "README.md", LIBRARY, ("python -m kvshift --test", "blocks README.md", "python examples/tiny_gpt.py 2")
    ),
    Environment("docs/tutorial.md", "pip install . accelerate", ("blocks docs/tutorial.md",), extends=LIBRARY),
    Environment("examples/trainer.py", "pip install . accelerate", ("python examples/trainer.py tr --steps 2",)),
    Environment(
        "examples/lora.py", "pip install '.[peft]'", ("python examples/lora.py lo --steps 2",), extends=LIBRARY
    ),
    Environment("examples/sft.py", "pip install '.[trl]'", ("python examples/sft.py tuned",), extends=LIBRARY),
    Environment(
        "README.md",
        LAB,
        (
            *PREPARED,
            "kvshift --help",
            f"kvshift compare --out runs/c --steps 2 --eval-every 1 --eval-rows 4 --step-time-seconds 1 {TINY}",
            "kvshift reproduce",
            "kvshift reproduce tab03 --preset smoke",
            "kvshift generate runs/mine --prompt ROMEO: --max-new-tokens 4",
            "kvshift eval runs/mine README.md --against runs/other",
            "kvshift analyze runs/mine",
            "kvshift check runs/mine",
            "kvshift retrofit runs/other/model retrofitted",
            "kvshift export runs/mine exported-pt2 --format pt2",
            "kvshift export runs/mine exported-code --remote-code",
        ),
        refused={
            "kvshift explore runs/mine --out page": "[export]",
            "kvshift export runs/mine exported": "[export]",
            "kvshift export runs/mine exported-mlx --format mlx": "mlx-lm",
            "kvshift eval runs/mine --tasks arc_easy --data questions": "[eval]",
            "kvshift reproduce fig01b --preset smoke --cluster ray": "[ray]",
            "kvshift train --out runs/w --report-to wandb": "report_to",
        },
    ),
    Environment(
        "docs/explore.md",
        "pip install './lab[export]'",
        ("kvshift explore runs/mine --out page", "kvshift explore runs/other runs/mine --out pair"),
        extends=LAB,
    ),
    Environment("docs/export.md", "pip install './lab[export]'", ("kvshift export runs/mine exported",), extends=LAB),
    Environment(
        "docs/eval.md",
        "pip install './lab[eval]'",
        ("kvshift eval runs/mine --tasks arc_easy --data questions",),
        extends=LAB,
    ),
    Environment(
        "docs/reproduce.md",
        "pip install './lab[ray]'",
        ("kvshift reproduce fig01b --preset smoke --cluster ray",),
        extends=LAB,
    ),
)


def site_packages(place: Path) -> Path:
    """Return the folder of the packages of a virtual environment."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(place)}))


def copy_sources(to: Path) -> None:
    """Copy what pip builds: its builds write into the folder, where other tests may be running."""
    leave_out = shutil.ignore_patterns("__pycache__", "_kernel.*", "tests")
    for name in ("src", "lab"):
        shutil.copytree(ROOT / name, to / name, ignore=leave_out)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, to)


def make(line: str, place: Path, beneath: Sequence[Path], sources: Path) -> None:
    """Create an environment in which the packages of other environments are found, and run the line of pip in it."""
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", place], check=True)
    lines = "".join(f"import site; site.addsitedir({str(site_packages(each))!r})\n" for each in beneath)
    (site_packages(place) / "beneath.pth").write_text(lines, encoding="utf-8")
    subprocess.run([*pip, *shlex.split(line)[1:], "--quiet", "--no-compile"], cwd=sources, check=True)


def run(command: str, place: Path, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page. `blocks PAGE` runs all Python blocks of a page as one program."""
    first, *rest = shlex.split(command)
    if first == "blocks":
        text = (ROOT / rest[0]).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        first, rest = "python", ["-c", "\n".join(blocks).replace("Qwen/Qwen3-0.6B", str(where / "qwen3"))]
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [place / "bin" / first, *rest], cwd=where, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )


def check(environment: Environment, place: Path, where: Path) -> None:
    """Run all commands of an environment; those that are refused may print one line, which names what is missing."""
    assert environment.install in (ROOT / environment.page).read_text(encoding="utf-8").replace("\n", " ")
    for command in environment.commands:
        done = run(command, place, where)
        offline = done.returncode == 2 and OFFLINE in done.stderr and "Traceback" not in done.stderr
        assert done.returncode == 0 or offline, f"after {environment.install}, {command}:\n{done.stdout}{done.stderr}"
    for command, named in environment.refused.items():
        done = run(command, place, where)
        last = (done.stderr.splitlines() or [""])[-1]
        about = f"after {environment.install}, {command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        assert done.returncode == 2, about
        assert "Traceback" not in done.stderr, about
        assert last.startswith(" ".join(command.split()[:2]) + ": "), about
        assert named in last, about
    count = len(environment.commands) + len(environment.refused)
    print(f"environments: {environment.page}, {environment.install}: {count} commands end as they should", flush=True)


def prepare(where: Path) -> None:
    """Write what the commands read: examples, a page, a small pretrained model and a few questions."""
    where.mkdir(parents=True, exist_ok=True)
    for name in ("examples", "README.md"):
        (where / name).symlink_to(ROOT / name)
    questions = where / "questions/arc"
    questions.mkdir(parents=True)
    line = '{"query": "Which one is %d?", "choices": ["one", "two", "three", "four"], "gold": %d}\n'
    (questions / "arc_easy_test.jsonl").write_text("".join(line % (n + 1, n % 4) for n in range(8)), encoding="utf-8")


SMALL_QWEN = """
from transformers import Qwen3Config, Qwen3ForCausalLM
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained("qwen3")
"""


def main(folder: Path) -> None:
    """Make all environments, one after the other, and check each."""
    where, sources = folder / "work", folder / "sources"
    for each in (where, sources):
        shutil.rmtree(each, ignore_errors=True)
    prepare(where)
    copy_sources(sources)
    places: dict[str, Path] = {}
    for environment in ENVIRONMENTS:
        line = environment.install
        if line not in places:
            places[line] = folder / str(len(places))
            beneath = [] if environment.extends is None else [places[environment.extends]]
            make(line, places[line], [*beneath, Path(sys.prefix)], sources)
        if line == LIBRARY:
            done = run(f"python -c {shlex.quote(SMALL_QWEN)}", places[line], where)
            assert done.returncode == 0, done.stderr
        check(environment, places[line], where)
        os.environ["KVSHIFT_PURE"] = "1"  # the first has compiled the kernel


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    os.environ.pop("PYTHONPATH", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles nothing here: the first import does, for all others
    main(Path(sys.argv[1]).resolve())
