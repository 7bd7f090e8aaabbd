"""Experiments: one question each, run as `python -m experiments.<room>.<name>`."""

import sys

from memjax.leaving import at_once

# While `python -m` imports the package. They resume from their folders.
if sys.argv[:1] == ["-m"]:
    # To the end of the program: without a name it would be closed here.
    _AT_ONCE = at_once(resumable=True, direct=True)
    _AT_ONCE.__enter__()
