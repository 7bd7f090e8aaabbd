"""What several processes must agree on, so that all of them do the same."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memjax.training.resume import as_json


def agreed(flag: bool) -> bool:
    """What process 0 says, so that all do the same."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def same_everywhere(data_state: Any) -> Any:
    """The position in the data, which one process writes down for all.

    Raises:
        ValueError: it is not JSON, or differs between processes.
    """
    text = json.dumps(as_json({"data": data_state}, "data.get_state()"), sort_keys=True)
    if jax.process_count() > 1:
        mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        found = np.asarray(multihost_utils.process_allgather(mine))
        if (found != found[:1]).any():
            raise ValueError(
                "data.get_state() must be the same on every process, so that any "
                f"number of them can resume; process {jax.process_index()} has {text}"
            )
    return data_state
