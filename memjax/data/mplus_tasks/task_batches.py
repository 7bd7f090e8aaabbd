"""An endless stream of M+'s training tasks in their proportions; see `tasks.py`.

The task of a step depends on the seed, the step, and whether an earlier target can be
revisited. A saved position restores all three.

Shapes: B batch elements of this host, W tokens of a text, I of an instruction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from memjax.data.batches.pipeline import chunked_batches
from memjax.data.batches.sampling import StepRandom
from memjax.data.documents.tokens import TokenisedDocument
from memjax.data.mplus_tasks.fact_tasks import FactTexts
from memjax.data.mplus_tasks.tasks import (
    UNSCORED,
    Assignment,
    MPlusTaskConfig,
    Target,
    Task,
    TaskBatch,
    lay_out,
)


class TaskBatches:
    """Yields tasks endlessly, each with this host's batch elements.

    Args:
        documents: from `load_tokens`.
        config: proportions and lengths.
        chunk: C.
        batch_size: batch elements over all hosts.
        seed: in [0, 2**32).
        instruction: tokens of "Repeat:".
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).
        facts: texts that state facts; required if `config.ask` is not 0.

    Raises:
        ValueError: as `chunked_batches`, for documents of the longest bucket; on chunk
            or instruction lengths that do not fit.
    """

    def __init__(
        self,
        documents: Sequence[TokenisedDocument],
        config: MPlusTaskConfig,
        chunk: int,
        batch_size: int,
        seed: int,
        instruction: Int32[np.ndarray, " I"],
        *,
        shard_index: int = 0,
        shard_count: int = 1,
        vocab_size: int | None = None,
        facts: FactTexts | None = None,
    ):
        if config.shortest_chunk > chunk:
            raise ValueError(
                f"shortest_chunk must be at most chunk={chunk}, "
                f"got {config.shortest_chunk}"
            )
        # Instruction and the first tokens of a repetition are not scored.
        least = len(instruction) + UNSCORED
        if config.repeat and least >= config.target:
            raise ValueError(
                f"target must be more than {least} tokens, of which the first are not "
                f"scored in a repetition, got {config.target}"
            )
        if bool(config.ask) != (facts is not None):
            raise ValueError(
                "facts must be given where ask > 0 and only there, got "
                f"ask={config.ask} and {facts}"
            )
        self._config, self._chunk, self._instruction = config, chunk, instruction
        self._facts = facts
        self._seed, self._batch_size = seed, batch_size
        rows = batch_size // shard_count
        self._mine = slice(shard_index * rows, (shard_index + 1) * rows)
        self._buckets = {
            count: chunked_batches(
                documents,
                count * chunk + config.target,
                batch_size,
                seed,
                shard_index=shard_index,
                shard_count=shard_count,
                vocab_size=vocab_size,
            )
            for count in config.chunks
        }
        self._step = 0
        # Chunks written since the target to revisit was stored; None without one.
        self._distance: int | None = None
        self._revisited = False

    def __iter__(self) -> "TaskBatches":
        return self

    def __next__(self) -> Assignment:
        # A stream per step: independent of what earlier steps sampled.
        rng = StepRandom(self._seed, self._step)
        self._step += 1
        task = self._choose(rng)
        self._revisited = task == "revisit"
        count = self._config.chunks[rng.integers(len(self._config.chunks))]
        if task == "revisit":
            if rng.uniform() < self._config.replace:
                self._distance = None
            return Assignment(task, self._empty_batch(rng))
        batch = self._task_batch(rng, task, count)
        if task == "full_context":
            return Assignment(task, batch)
        if self._distance is None or rng.uniform() < self._config.renew:
            keep, self._distance = True, 0
        else:
            keep, self._distance = False, self._distance + batch.chunks.shape[1]
        return Assignment(task, batch._replace(keep=np.full_like(batch.keep, keep)))

    def _choose(self, rng: StepRandom) -> Task:
        shares = self._config
        # Always all three, so that later numbers do not depend on the task.
        full, again, multi = rng.uniform(), rng.uniform(), rng.uniform()
        if full < shares.full_context:
            return "full_context"
        if self._distance and not self._revisited and again < shares.revisit:
            return "revisit"
        return "multi_chunk" if multi < shares.multi_chunk else "two_chunk"

    def _task_batch(self, rng: StepRandom, task: Task, bucket: int) -> TaskBatch:
        """A batch of the next documents, or of facts, whose target is not stored."""
        c, rows = self._config, self._batch_size
        count = 0 if task == "full_context" else bucket
        choices = self._chunk - c.shortest_chunk + 1
        lengths = c.shortest_chunk + rng.integers(choices, (rows, count))[self._mine]
        last = task == "two_chunk"
        if count and self._facts is not None and rng.uniform() < c.ask:
            lengths = lengths[:, -1 if last else None :]
            made = self._fact_elements(self._facts, rng, lengths)
        else:
            made = self._text_elements(rng, bucket, lengths, last)
            lengths = lengths[:, -1 if last else None :]
        chunks, targets = zip(*made, strict=True)
        return TaskBatch(
            chunks=np.stack(chunks),
            lengths=lengths.astype(np.int32),
            target=Target(*map(np.stack, zip(*targets, strict=True))),
            num_queries=self._num_queries(rng),
            keep=np.zeros(len(made), bool),
        )

    def _text_elements(self, rng, bucket, lengths, last):
        """Batch elements of the next texts of a bucket."""
        c, count = self._config, lengths.shape[1]
        batch = next(self._buckets[bucket])
        text = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
        # For all batch elements, so that hosts agree on the global batch.
        repeats = (rng.uniform(self._batch_size) < c.repeat)[self._mine]
        return [
            lay_out(
                tokens,
                row.tolist(),
                self._chunk,
                c.target,
                self._instruction if count and again else None,
                last,
            )
            for tokens, row, again in zip(text, lengths, repeats, strict=True)
        ]

    def _fact_elements(self, facts, rng, lengths):
        """Batch elements of facts, independent of those of other hosts."""
        # Seeds of all hosts, then of this one: the global batch does not depend on
        # the number of hosts.
        seeds = rng.integers(2**32, self._batch_size)[self._mine].tolist()
        return [
            facts.batch_element(StepRandom(seed, self._step), row.tolist())
            for seed, row in zip(seeds, lengths, strict=True)
        ]

    def _empty_batch(self, rng: StepRandom) -> TaskBatch:
        """The empty batch of a revisit; its target is stored with the memory."""
        num_queries = self._num_queries(rng)
        none = np.zeros((len(num_queries), 0, self._chunk), np.int32)
        tokens = np.zeros((len(num_queries), self._config.target), np.int32)
        target = Target(tokens, tokens, tokens.astype(np.float32))
        return TaskBatch(
            none, none[:, :, 0], target, num_queries, np.zeros(len(num_queries), bool)
        )

    def _num_queries(self, rng):
        count = 1 + rng.integers(self._config.target - 1, self._batch_size)[self._mine]
        return count.astype(np.int32)

    def get_state(self) -> dict[str, Any]:
        """Returns the position, the same on every host, ready for JSON."""
        return {
            "step": self._step,
            "distance": self._distance,
            "revisited": self._revisited,
            "buckets": {
                str(n): bucket.get_state() for n, bucket in self._buckets.items()
            },
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` gave, on any number of hosts.

        Raises:
            ValueError: the state is malformed, or is of other documents or buckets.
        """
        buckets, distance = state.get("buckets"), state.get("distance")
        if not isinstance(buckets, Mapping) or set(buckets) != {
            str(n) for n in self._buckets
        }:
            raise ValueError(
                f"state['buckets'] must be of chunks={self._config.chunks}, "
                f"got {buckets!r}"
            )
        for name in ("step", "distance"):
            value = state.get(name)
            if not (name == "distance" and value is None) and (
                type(value) is not int or value < 0
            ):
                raise ValueError(f"state[{name!r}]={value!r} must be an integer >= 0")
        if type(state.get("revisited")) is not bool:
            raise ValueError(
                f"state['revisited']={state.get('revisited')!r} must be true or false"
            )
        for n, bucket in self._buckets.items():
            bucket.set_state(buckets[str(n)])
        self._step, self._distance = state["step"], distance
        self._revisited = state["revisited"]
