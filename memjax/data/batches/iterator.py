"""The iterator of batches, on any number of hosts, with a position that can be saved.

There is one global batch, which does not depend on the number of hosts. A host reads
its contiguous elements [shard_index * R, (shard_index + 1) * R), R = batch_size /
shard_count. So a saved position can be restored on another number of hosts, and batch
element r carries the same stream before and after.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from memjax.data.batches.batch import Batch
from memjax.data.batches.rows import HostRows, Rows
from memjax.data.documents.token_file import TokenisedDocument, content_digest


class BatchIterator:
    """Yields B = batch_size / shard_count elements of each batch, endlessly."""

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        identity: Mapping[str, Any],
        shard_index: int,
        shard_count: int,
    ):
        self._batch_size = batch_size
        self._identity = {**identity, "batch_size": batch_size}
        ordered = grain.MapDataset.source(HostRows(rows, batch_size, shard_count))
        elastic = grain.experimental.ElasticIterator(
            ordered,
            batch_size,
            grain.sharding.ShardOptions(shard_index, shard_count),
            # Tokens are memory-mapped: threads would only contend for the GIL.
            read_options=grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),
        )
        self._iterator = iter(elastic)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position, the same on every host, ready for JSON."""
        index = self._iterator.get_state()["global_next_index"]
        return {"step": index // self._batch_size, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` gave, on any number of hosts.

        Raises:
            ValueError: the state is malformed, or comes from other documents, other
                tokens of them ("content"), lengths, batch size or seed (the message
                says which).
        """
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise ValueError(f"state['step']={step!r} must be an integer >= 0")
        # A position is valid for the same documents, lengths and seed only.
        # Earlier versions did not record the content.
        for key, value in self._identity.items():
            if state.get(key, value if key == "content" else None) != value:
                raise ValueError(
                    f"state[{key!r}]={state.get(key)!r} belongs to another pipeline: "
                    f"this one has {value!r}"
                )
        self._iterator.set_state({"global_next_index": step * self._batch_size})


def identity(
    mode: str, length: int, seed: int, documents: Sequence[TokenisedDocument]
) -> dict[str, Any]:
    """Identity of a stream: a digest of the documents' tokens, and the cutting."""
    digest = hashlib.sha256(
        repr([(d.name, len(d.tokens)) for d in documents]).encode("utf-8")
    )
    return {
        "mode": mode,
        "length": length,
        "seed": seed,
        "documents": digest.hexdigest()[:16],
        "content": content_digest(documents),
    }
