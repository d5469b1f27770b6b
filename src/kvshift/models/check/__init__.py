"""Whether a causal language model of transformers is right at its edges: documents, padding, caches, generation.

`check_model(model)` checks any: ours, retrofits, the models of transformers, remote code. `kvshift check` is its
command line; docs/check.md says what each property is.
"""

from kvshift.models.check.findings import Report, Verdict
from kvshift.models.check.properties import PROPERTIES
from kvshift.models.check.suite import check_model

__all__ = ["PROPERTIES", "Report", "Verdict", "check_model"]
