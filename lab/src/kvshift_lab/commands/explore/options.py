"""Options of `kvshift explore`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvshift_lab.core.errors import LabError, require, require_new, require_unicode


@dataclass(frozen=True, kw_only=True)
class ExploreConfig:
    """The models to explore, and the folder of the page.

    The page runs the models in the reader's browser and needs a web server, such as that of --open. Without MODEL,
    --open serves an existing page.
    """

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL ...]")] = ()
    """One model, or two with the same tokenizer side by side: run folders, model folders, or models on the hub."""
    out: Path
    """Folder of the page; it must not exist, or be empty. With --open alone, the folder of a page."""
    open: bool = False
    """Serve the page on the loopback address and open a browser, until Ctrl-C."""
    text: str | None = None
    """Initial text. None: a sentence that repeats itself."""
    explain: bool = False
    """Begin with the one-minute explanation of the shift, for two one-layer models of letters, without and with it."""
    port: int = 0
    """Port of --open. 0: any free port."""

    def check(self) -> None:
        """Raise a LabError that names the invalid option, its value and the values that are allowed."""
        require(len(self.models) <= 2, "models", [*self.models], "one or two")
        require(0 <= self.port < 2**16, "port", self.port, "between 0 and 65535")
        require_unicode(self.text or "", "text")
        if self.explain and len(self.models) != 2:
            raise LabError("explain needs two models, the first without shift and the second with it")
        if self.text is not None and not self.models:
            raise LabError("text has no effect without models: leave it out")
        if self.port and not self.open:
            raise LabError("port has no effect without open: leave it out")

    def check_paths(self) -> None:
        """Raise a LabError if `out` exists and is not an empty folder or, without models, if it contains no page, or if
        there is no such model."""
        from kvshift_lab.run.model_files import require_models  # the hub's package

        if self.models:
            require_new(self.out)
            require_models(*self.models)
        elif not self.open or not (self.out / "facts.json").is_file():
            raise LabError(
                f"models: give one or two, or --open with the folder of an existing page in --out; got {self.out}"
            )
