"""Abstract programs of a run's steps: shapes with shardings, without arrays.

They are the functions that train, evaluate and generate, with the same sharding.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from memjax.data import load_tokenizer
from memjax.data.documents.token_file import TokenisedDocument
from memjax.evaluation.losses import score_segment
from memjax.models import ModelConfig
from memjax.models.base import Model
from memjax.models.offload import HOST
from memjax.training import launch
from memjax.training.config import DataConfig
from memjax.training.distributed import sharding
from memjax.training.launch import Run

What = Literal["train", "evaluate", "prefill", "decode"]


class Step(NamedTuple):
    """A program and its arguments.

    Attributes:
        function: jitted.
        arguments: shapes with their shardings.
        parts: the arguments by name, for a table.
        tokens: read in a call, over all devices.
    """

    function: Any
    arguments: tuple[PyTree, ...]
    parts: Mapping[str, PyTree]
    tokens: int


def build(run: Run, what: What, mesh: Mesh) -> Step:
    """The step of a run on a mesh.

    Raises:
        ValueError: batch or heads do not divide among the devices.
    """
    sharding.require_divides(
        mesh, run.data.batch_size, run.language_model, run.tokens_read
    )
    if what == "evaluate":
        return _evaluation(run, mesh)
    if what in ("prefill", "decode"):
        return _generation(run, mesh, what)
    return _training(run, mesh)


def _training(run: Run, mesh: Mesh) -> Step:
    """The program of a run's first batch."""
    shapes = run.state_shapes()
    layout = sharding.shardings(mesh, shapes, run.language_model)
    called: list[tuple[Callable, PyTree]] = []

    def compiled(update):
        rated = launch.with_rate(update, run.optimizer, run.loop.steps)
        return lambda state, batch: (state, called.append((rated, batch)))

    # Only the shapes of a batch count: any text gives them.
    # Tasks of M+ may be many times as long as its shortest document.
    length = 32 * run.shortest_document + run.data.context_length
    text = np.zeros(length, np.int32)
    documents = [TokenisedDocument("text", "text", text)]
    sources = [documents for _ in run.data.sources]
    data = run.batches(sources, load_tokenizer("bytes"))
    run.make_step(compiled)(cast(Any, None), next(data))
    ((update, batch),) = called
    tokens = run.data.batch_size * run.tokens_read
    return _update(update, layout, placed(shapes, layout), batch, mesh, tokens)


def _update(update, layout, state, batch, mesh, tokens):
    rows = jax.tree.leaves(batch)[0].shape[0]
    batch = _everywhere(batch, sharding.batch_sharding(mesh, rows))
    parts = {
        "parameters": state.params,
        "optimizer": state.optimizer,
        "memory": state.memory,
        "frozen parameters": state.frozen,
        "batch": batch,
    }
    return Step(launch.jitted(update, layout), (state, batch), parts, tokens)


def _evaluation(run: Run, mesh: Mesh) -> Step:
    """Scores of one segment, as validation reads its texts."""
    data, graph, params, config = _model(run, mesh)
    rows = min(data.batch_size, data.validation_texts)
    memory = _memory(graph, params, rows, data.context_length)
    tokens = _shape((rows, data.context_length), jnp.int32)
    function = jax.jit(functools.partial(score_segment, graph))
    return _reading(function, params, memory, (tokens, tokens), mesh, config)


def _generation(run: Run, mesh: Mesh, what: What) -> Step:
    """A call of every sequence's prompt, or one token of it, as `generate` reads it."""
    data, graph, params, config = _model(run, mesh)
    memory = _memory(graph, params, data.batch_size, data.context_length)
    count = 1 if what == "decode" else nnx.merge(graph, params).window
    tokens = _shape((data.batch_size, count), jnp.int32)

    def read(params, state, tokens):
        model: Model = nnx.merge(graph, params)
        state, features = model.features(state, tokens)
        return state, model.logits(features[:, -1:])

    function = jax.jit(read, donate_argnums=1)
    return _reading(function, params, memory, (tokens,), mesh, config)


def _model(run: Run, mesh: Mesh) -> tuple[DataConfig, Any, PyTree, ModelConfig]:
    """Documents, structure and parameters of a run, and its language model."""
    graph, params = nnx.split(run.structure())
    return run.data, graph, params, run.language_model


def _memory(graph, params, rows, capacity):
    """Shapes of an empty memory, and whether each is on the host."""

    def empty(params):
        return nnx.merge(graph, params).init_state(rows, capacity)

    program, shapes = jax.make_jaxpr(empty, return_shape=True)(params)
    spaces = [aval.memory_space for aval in program.out_avals]
    on_host = [space == jax.memory.Space.Host for space in spaces]
    return shapes, jax.tree.unflatten(jax.tree.structure(shapes), on_host)


def _reading(function, params, memory, tokens, mesh, config):
    """The step of a model that reads tokens into its memory."""
    state, on_host = memory
    given = {"params": params, "memory": state}
    layout = sharding.shardings(mesh, given, config)
    layout["memory"] = jax.tree.map(
        lambda where, host: where.with_memory_kind(HOST) if host else where,
        layout["memory"],
        on_host,
    )
    given = placed(given, layout)
    # Every device that shares the batch takes its rows.
    rows = sharding.batch_sharding(mesh, tokens[0].shape[0])
    tokens = _everywhere(tokens, rows)
    parts = {"parameters": given["params"], "memory": given["memory"], "batch": tokens}
    arguments = (given["params"], given["memory"], *tokens)
    return Step(function, arguments, parts, tokens[0].size)


def _shape(sizes: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def placed(shapes: PyTree, layout: PyTree) -> PyTree:
    """Shapes with a sharding each."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        layout,
    )


def _everywhere(tree: PyTree, where: NamedSharding) -> PyTree:
    """Shapes with the same sharding."""
    return placed(tree, jax.tree.map(lambda _: where, tree))


def device_bytes(tree: PyTree, *, host: bool = False) -> int:
    """Bytes of a tree's arrays on one device, without the padding of its layout.

    With `host`, of those in the memory of the device's host.
    """
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * _itemsize(x)
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == HOST) == host
    )


def _itemsize(x: Any) -> int:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Two words of 32 bits.
        return 8
    return x.dtype.itemsize
