"""Experiments: one question each, run as `python -m experiments.<room>.<name>`."""

import sys

from memjax.leaving import at_once

# While `python -m` imports the package. They resume from their folders.
if sys.argv[:1] == ["-m"]:
    at_once(resumable=True).__enter__()
