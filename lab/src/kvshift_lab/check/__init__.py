"""Checks of a causal language model of transformers at its edges: documents, padding, caches, generation.

`check_model(model)` checks any such model: those of this package, retrofitted ones, those of transformers, remote code.
`kvshift check` is its command line; docs/check.md describes the properties.
"""

from kvshift_lab.check.findings import Report, Verdict
from kvshift_lab.check.properties import PROPERTIES
from kvshift_lab.check.suite import check_model

__all__ = ["PROPERTIES", "Report", "Verdict", "check_model"]
