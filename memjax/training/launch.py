"""The `Run` protocol, and the launch of a run of either kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from memjax.buckets.writing import write_atomically
from memjax.config_io import AnyPath
from memjax.data import TokenisedDocument, Tokenizer
from memjax.models import ModelConfig
from memjax.models.base import Model
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.status import Status
from memjax.training import loop
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.config import DataIterator, Kind, LoopConfig, Outcome
from memjax.training.distributed import sharding
from memjax.training.monitoring import header
from memjax.training.optimizer import OptimizerConfig, schedule
from memjax.training.run_data import (
    DataConfig,
    check_epochs,
    load_sources,
    validation,
)
from memjax.training.run_folder import RunFolder, record_config
from memjax.training.step import Compile, Step, TrainState

#: Makes the first state, and updates it.
Programs = tuple[Callable[..., TrainState], Step]


@runtime_checkable
class Run(Protocol):
    """Settings of a run: a `RunConfig`, or a `FinetuneRun` around a backbone."""

    #: The command that trains it.
    kind: ClassVar[Kind]

    @property
    def data(self) -> DataConfig: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def loop(self) -> LoopConfig: ...

    @property
    def mesh(self) -> sharding.MeshConfig: ...

    @property
    def seed(self) -> int: ...

    @property
    def language_model(self) -> ModelConfig:
        """Of the model that is trained, or of the backbone inside it."""
        ...

    @property
    def origin(self) -> str:
        """The pretrained model: a path or "owner/name@commit"; empty without one."""
        ...

    @property
    def memory_name(self) -> str:
        """The memory that is trained, for messages."""
        ...

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample that a step reads."""
        ...

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        ...

    def structure(self) -> Model:
        """The model with shapes for parameters."""
        ...

    def text(self, folder: AnyPath) -> TextInterface:
        """Tokenizer and chat template, from the folder of the run."""
        ...

    def batches(
        self,
        sources: Sequence[Sequence[TokenisedDocument]],
        tokenizer: Tokenizer,
        part: tuple[int, int] = (0, 1),
    ) -> DataIterator:
        """The batches of all steps, or a host's part of each."""
        ...

    @property
    def create_state(self) -> Callable[..., TrainState]:
        """The state before the first step, of a key or of a model's variables."""
        ...

    def state_shapes(self) -> TrainState:
        """The state with shapes for arrays."""
        ...

    def make_step(self, compiled: Compile) -> Step:
        """The update; `compiled` makes programs of its pure parts."""
        ...

    def flops_per_step(self, state: TrainState) -> float:
        """Operations of a step over all devices."""
        ...


def launch(
    run: Run,
    run_dir: AnyPath | str,
    tokenizer: Tokenizer,
    programs: Callable[[Mesh], Programs],
    first_state: Callable[[Callable[..., TrainState], Any], TrainState],
    *,
    files: Mapping[str, bytes],
    record: Mapping[str, Any],
    may_change: frozenset[str],
    completed: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Outcome:
    """Trains a run to its last step, from its newest checkpoint if there is one.

    Args:
        run: its settings.
        run_dir: its folder, or its URL in a bucket.
        tokenizer: of the run.
        programs: compiles both programs for a mesh; see `make_programs`.
        first_state: called with the first of them and the training documents by
            source, if there is no checkpoint.
        files: written into the folder.
        record: stored in each checkpoint, as JSON.
        may_change: fields of the record that may differ on resuming.
        completed: gives a checkpoint's record the fields added since.

    Raises:
        ValueError: see `memjax.training.loop.train`.
        LockedError: another process trains in `run_dir`.
    """
    mesh = sharding.make_mesh(run.mesh)
    rows, length = run.data.batch_size, run.tokens_read
    sharding.require_divides(mesh, rows, run.language_model, length)
    quiet = jax.process_index() != 0
    with Status("reading documents", quiet=quiet):
        sources = load_sources(run.data, tokenizer, "train")
    check_epochs(run.data, sources, run.loop.steps * rows * length)
    data = run.batches(sources, tokenizer, sharding.host_part(mesh))
    # Before the work starts: another run's folder is refused at once.
    with RunFolder(run_dir) as folder:
        record_config(run, folder, may_change)
        if jax.process_index() == 0:
            for name, content in files.items():
                file = folder.files / name
                file.parent.mkdir(exist_ok=True)
                write_atomically(file, content.decode())
        header.show(
            run.data,
            run.loop,
            run.structure(),
            mesh,
            sources,
            tokenizer,
            tokens_per_step=rows * length,
            shortest=run.shortest_document,
        )
        evaluate = None
        if run.loop.evaluate_every:
            evaluate = validation(run, tokenizer, run.structure())
        if open_folder(folder.checkpoints).steps():
            # The arrays come from the checkpoint.
            state = state_layout(run, mesh)
        else:
            with Status("creating the first state", quiet=quiet):
                state = first_state(programs(mesh)[0], sources)
        flops = run.flops_per_step(state)
        header.show_cost(state, flops)
        _, outcome = loop.train(
            # Compiled at the first step: a finished run takes none.
            lambda state, batch: programs(mesh)[1](state, batch),
            state,
            data,
            run.loop,
            folder,
            config_record=dict(record),
            tokens_per_step=rows * length,
            evaluate=evaluate,
            may_change=may_change,
            completed=completed,
            flops_per_step=flops,
        )
    return outcome


def make_programs(run: Run, mesh: Mesh) -> Programs:
    """The first state, laid out on the mesh, and the update, both compiled on use."""
    layout = sharding.shardings(mesh, run.state_shapes(), run.language_model)

    def compiled(update):
        return on_mesh(with_rate(update, run.optimizer, run.loop.steps), layout, mesh)

    step = run.make_step(compiled)
    if mesh.size == 1 and run.kind == "train" and run.language_model.scan_layers:
        # A layer at a time by one program: XLA compiles each draw of a program anew.
        return lambda key: jax.device_put(run.create_state(key), layout), step
    create = jax.jit(
        run.create_state, out_shardings=layout, compiler_options=_options(mesh)
    )
    return create, step


def _options(mesh: Mesh) -> dict[str, int] | None:
    """Compiler options of a program that runs once."""
    if mesh.devices.flat[0].platform != "cpu":
        return None
    # LLVM takes half as long: a program of random draws is many loops of integers that
    # it would unroll. Some draws may differ in the last bit, as they do in a program of
    # other layers.
    return {"xla_backend_optimization_level": 1}


def state_layout(run: Run, mesh: Mesh) -> TrainState:
    """The state with shapes and shardings for arrays."""
    shapes = run.state_shapes()
    layout = sharding.shardings(mesh, shapes, run.language_model)

    def placed(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(placed, shapes, layout)


def with_rate(update: Step, config: OptimizerConfig, steps: int) -> Step:
    """The update, with the learning rate of its step among the metrics."""
    rate = schedule(config, steps)

    def update_with_rate(state, batch):
        new, metrics = update(state, batch)
        # The optimizer's own count: a skipped step has no rate.
        found = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
        return new, metrics | {"learning_rate": rate(found[0][1])}

    return update_with_rate


def on_mesh(update: Step, layout: PyTree, mesh: Mesh) -> Step:
    """The jitted update of a state laid out so, taking this host's rows of a batch."""
    step = jitted(update, layout)

    def step_on_mesh(state, batch):
        # XLA divides the program among the devices; kernels ask which mesh is set.
        with jax.set_mesh(mesh):
            return step(state, sharding.put_batch(mesh, batch))

    return step_on_mesh


def jitted(update: Step, layout: PyTree) -> Any:
    """The compiled update of a state and a batch on the devices."""
    # Donated: parameters and moments are updated in place, without a second copy.
    return jax.jit(update, donate_argnums=0, out_shardings=(layout, None))
