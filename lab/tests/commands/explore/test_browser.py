"""The page in a real Chromium: what it computes, how it is used, and how it looks.

`make test-browser` runs these tests. With KVSHIFT_SCREENSHOTS=FOLDER they leave screenshots of the page there.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshift_lab.commands.explore import explorer_model
from kvshift_lab.commands.explore.command import explore
from kvshift_lab.commands.explore.explorer_model import ExplorerModel
from kvshift_lab.commands.explore.options import ExploreConfig
from kvshift_lab.commands.explore.page_server import page_server
from kvshift_lab.commands.explore.web_runtime import runtime_folder
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.head_scores import attention_scores
from kvshift_lab.run.loading import load_weights

from ...generation_cases import save_model, tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
PROMPTS = [
    "to be or not to be", "that is the question", "t", "the mind", "whether 'tis nobler in", "naïve café — 東京 🙂",
    "a a a a a",
    "to be\nor not\nto be", "   spaces   ", "0123456789", "nobler nobler", "QUESTION", "in the mind to be or not",
    "or not to be, that is", "be", "the question: whether 'tis", "café café", "🙂🙂🙂", "mind the mind", "to to be be",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a page for two models, without and with shift, built in the way of large models."""
    try:
        runtime_folder(lambda text: None)
    except LabError as error:
        if not isinstance(error.__cause__, OSError):  # it was downloaded, and is wrong
            raise
        pytest.skip(str(error))
    place = tmp_path_factory.mktemp("explore")
    tokenizer().save_pretrained(place / "tokenizer")
    models = [
        save_model(place / name, shift_targets=targets, num_attention_heads=4, num_key_value_heads=2, head_dim=10)
        for name, targets in (("plain", ()), ("shifted", ("k", "v")))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer_model, "_INSIDE", 0)  # large models have their weights beside the programs
        explore(ExploreConfig(models=tuple(map(str, models)), out=place / "page", text=PROMPTS[0]))
    return place


@pytest.fixture(scope="module")
def lesson(folder: Path) -> Iterator[str]:
    """The address of the page that explains the idea."""
    models = tuple(f"docs/induction/{name}" for name in ("without", "with"))
    explore(ExploreConfig(models=models, out=folder / "lesson", explain=True))
    yield from _served(folder / "lesson")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    yield from _served(folder / "page")


def _served(page: Path) -> Iterator[str]:
    with page_server(page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield found
        found.close()


class Tab:
    """The page in a tab, with everything that it requested and logged."""

    def __init__(self, browser: Any, address: str, size: str = "wide", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console", lambda line: self.faults.append(line.text) if line.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.goto(address)
        self.settle()

    def settle(self) -> None:
        """Wait until all pending results are computed and drawn."""
        deadline = time.monotonic() + 120
        while not self.read(
            "globalThis.explorer?.isSettled()"
        ):  # wait_for_function evaluates a string, which the page forbids
            assert time.monotonic() < deadline, self.page.inner_text("#status")
            self.page.wait_for_timeout(20)

    def write(self, text: str) -> None:
        self.page.fill("#text", text)
        self.settle()

    def read(self, expression: str) -> Any:
        return self.page.evaluate(expression)


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Tab]:
    found = Tab(browser, address)
    yield found
    assert found.faults == []
    found.context.close()


def test_tokens_and_probabilities_are_those_of_pytorch(tab: Tab, folder: Path):
    encode = tokenizer()
    models = [load_weights(folder / name, attn_implementation="eager") for name in ("plain", "shifted")]
    assert len(PROMPTS) == 20
    for prompt in PROMPTS:
        tab.write(prompt)
        ids = encode(prompt)["input_ids"]
        assert tab.read("explorer.tokens()") == ids
        for number, model in enumerate(models):
            with torch.no_grad():
                output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
            found = tab.read(f"explorer.result({number})")
            assert [one["tokens"][0]["id"] for one in found["next"]] == output.logits[0].argmax(-1).tolist(), prompt
            best = torch.tensor([one["tokens"][0]["probability"] for one in found["next"]])
            torch.testing.assert_close(best, output.logits[0].softmax(-1).amax(-1), atol=1e-5, rtol=1e-4)
            for layer, expected in zip(found["attention"], output.attentions, strict=True):
                found_layer = torch.tensor(layer, dtype=torch.float32)
                torch.testing.assert_close(found_layer, expected.flatten(), atol=1e-5, rtol=1e-4)


def test_coefficients_are_inputs(tab: Tab, folder: Path):
    """After a slider changes one coefficient, predictions and scores equal those of a model that has it."""
    tab.page.locator("#models article").nth(1).locator("input[type=range]").first.fill("-0.5")
    tab.settle()
    chosen = tab.read("explorer.chosen(1)")
    watched = ExplorerModel(load_weights(folder / "shifted", attn_implementation="eager"))
    coefficients = watched.coefficients()
    coefficients[str(chosen["layer"])]["alpha"][chosen["head"] // 2, 0] = -0.5
    facts = json.loads((folder / "page" / "facts.json").read_text(encoding="utf-8"))["models"][1]
    with torch.no_grad():
        output = watched(torch.tensor([tab.read("explorer.tokens()")]), coefficients)
        repeats = [watched(torch.tensor([row]), coefficients)["attention"] for row in facts["repeats"]["rows"]]
    found = tab.read("explorer.result(1)")
    assert [one["tokens"][0]["id"] for one in found["next"]] == output["logits"][0].argmax(-1).tolist()
    for number, layer in coefficients.items():
        attention = torch.cat([row[number] for row in repeats])
        expected = attention_scores(attention, length=facts["repeats"]["length"], **layer)
        for score, ours in zip(tab.read("explorer.scores(1)")[int(number)], expected, strict=True):
            assert score["induction"] == pytest.approx(ours.moved["earlier+1"], abs=1e-5)
            assert score["previous"] == pytest.approx(ours.moved["previous"], abs=1e-5)
            assert score["duplicate"] == pytest.approx(ours.moved["earlier"], abs=1e-5)
            assert score["alone"] == pytest.approx(ours.alone, abs=1e-5)
    changed = tab.read("explorer.scores(1)")
    tab.page.get_by_role("button", name="Learned values").click()
    tab.settle()
    learned = tab.read("explorer.scores(1)")
    assert learned != changed
    for head in facts["scores"]:
        assert learned[head["layer"]][head["head"]]["induction"] == pytest.approx(head["moved"]["earlier+1"], abs=1e-5)


def test_opened_from_a_file_the_page_says_what_it_needs(browser: Any, folder: Path):
    page = browser.new_page()
    page.goto((folder / "page/index.html").as_uri())
    page.get_by_text("Opened from a file it cannot").wait_for(timeout=10_000)
    assert "kvshift explore --out FOLDER --open" in page.inner_text("#status")
    page.close()


def test_keyboard(tab: Tab):
    """Tokens, heads and coefficients can be reached and changed without a pointer."""
    page = tab.page
    page.focus("#text")
    for _ in range(12):  # skip the examples
        page.keyboard.press("Tab")
        if tab.read("document.activeElement.parentElement.id") == "tokens":
            break
    last = len(tab.read("explorer.tokens()")) - 1
    assert tab.read("explorer.query()") == last
    page.keyboard.press("ArrowLeft")
    assert tab.read("explorer.query()") == last - 1
    page.keyboard.press("Home")
    assert tab.read("explorer.query()") == 0
    assert tab.read("document.activeElement.getAttribute('aria-checked')") == "true"
    page.keyboard.press("Tab")
    assert tab.read("document.activeElement.id") == "color"
    page.keyboard.press("Tab")
    before = tab.read("explorer.chosen(0)")
    key = "ArrowLeft" if before["head"] else "ArrowRight"
    page.keyboard.press(key)
    after = tab.read("explorer.chosen(0)")
    assert abs(after["head"] - before["head"]) == 1
    assert tab.read("document.activeElement.getAttribute('role')") == "radio"  # the focus is kept
    slider = page.locator("#models article").nth(1).locator("input[type=range]").first
    value = float(slider.input_value())
    slider.focus()
    page.keyboard.press("ArrowRight")
    tab.settle()
    assert float(slider.input_value()) == pytest.approx(value + 0.01)
    assert tab.read("document.activeElement.type") == "range"


def test_pointer(tab: Tab):
    page = tab.page
    title = page.locator("#models article").first.locator("h3").first
    selected = title.inner_text()
    page.locator("#tokens button").first.hover()
    assert title.inner_text() != selected
    page.mouse.move(5, 5)
    assert title.inner_text() == selected
    page.locator("#tokens button").nth(1).click()
    assert tab.read("explorer.query()") == 1
    canvas = page.locator("canvas").nth(1)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + box["height"] - 3)
    note = page.locator(".map-note").nth(1).inner_text()
    assert note.startswith("From ")
    assert "(1):" in note
    page.locator(".heads .name").last.click()
    assert page.locator(".heads li.selected").count() == 2


def test_a_text_that_is_too_long_or_empty(tab: Tab):
    tab.write("to be " * 100)
    assert "Only the first 64" in tab.page.inner_text("#status")
    assert len(tab.read("explorer.tokens()")) == 64
    tab.write("")
    assert tab.page.inner_text("#status") == "Type something."
    tab.write("to be")
    assert "computed in" in tab.page.inner_text("#status")


def test_the_lesson(browser: Any, lesson: str):
    """Each model's text states if it copies; the first view holds both figures, and does not move when they come."""
    tab = Tab(browser, lesson)
    stories = tab.page.locator(".story")
    boxes = [stories.nth(number).bounding_box() for number in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert max(box["y"] + box["height"] for box in boxes) <= SIZES["wide"][1]
    below = tab.page.locator("#closer").bounding_box()["y"]
    tab.write("the cat sat on the")
    assert tab.page.locator("#closer").bounding_box()["y"] == below
    assert tab.page.inner_text("#left-out") == "Each letter is a token; 4 spaces are left out."
    assert "it does not copy" in stories.nth(0).inner_text()
    assert "answers c, with 45 %: it copies" in stories.nth(1).inner_text()
    assert "100 % from e, the token before" in stories.nth(1).inner_text()
    tab.write("a")
    assert "whose key is almost empty: there is no token before it." in stories.nth(1).inner_text()
    tab.write("the cat sat on the")
    tab.page.fill("#amount", "0")
    tab.settle()
    assert "it does not copy" in stories.nth(1).inner_text()
    assert tab.faults == []
    tab.context.close()
