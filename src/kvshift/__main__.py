"""`python -m kvshift`, which is what `torchrun -m kvshift train ...` starts."""

import sys

from kvshift.cli import main

sys.exit(main())
