"""The public names of the package."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_public_names_are_imported_when_they_are_used():
    program = """
import sys, kvshift
assert set(kvshift.__all__) <= set(dir(kvshift))
assert "torch" not in sys.modules
assert kvshift.KVShift is kvshift.layers.KVShift
from kvshift import *
assert kv_shift is kvshift.ops.kv_shift
assert not hasattr(kvshift, "kv_shfit")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
