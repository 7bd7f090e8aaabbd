"""A small training run, as a program that the tests kill, stop and damage.

    python toy_run.py RUN_DIR '{"steps": 20, ...}'

Beside the fields of `LoopConfig` the JSON may hold: `sleep` (seconds a step takes),
`size` (width of the model), `nan_steps` (steps whose batch has a NaN), `rate`
(learning rate), `compile_sleep` and `evaluate_sleep` (seconds), `processes` and
`process` and `port` (several processes), `batches` (where the data ends),
`room_seconds` (that a program waits for a full disk). At the end it writes the bytes of
the state to `final.bin`.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memjax.buckets.bucket import as_path
from memjax.training import loop as training_loop
from memjax.training.config import LoopConfig
from memjax.training.loop import train

BATCH, LOOP_FIELDS = 8, tuple(LoopConfig.__dataclass_fields__)


class State(NamedTuple):
    """Parameters, momentum, a memory carried from step to step, key and step."""

    params: dict[str, jax.Array]
    momentum: dict[str, jax.Array]
    memory: jax.Array
    key: jax.Array
    step: jax.Array


def init(size: int) -> State:
    params = {"w": jnp.ones((size, size)) / size, "b": jnp.zeros(size, jnp.bfloat16)}
    return State(
        params,
        jax.tree.map(jnp.zeros_like, params),
        jnp.zeros(size),
        jax.random.key(7),
        jnp.zeros((), jnp.int32),
    )


def loss_of(params: Any, memory: jax.Array, x: jax.Array, key: jax.Array) -> Any:
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    y = jnp.tanh((x * keep) @ params["w"] + params["b"][None] + memory[None])
    return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2), 0.9 * memory + 0.1 * y.mean(0)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3))
def train_step(state: State, x: jax.Array, rate: float, compile_sleep: float) -> Any:
    if compile_sleep:  # tracing happens once, so this is a slow compilation
        print("compiling", flush=True)
        time.sleep(compile_sleep)
    key = jax.random.fold_in(state.key, state.step)
    (loss, memory), grads = jax.value_and_grad(loss_of, has_aux=True)(
        state.params, state.memory, x, key
    )
    finite = jnp.isfinite(loss)

    def choose(new, old):
        return jnp.where(finite, new, old)

    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
    params = jax.tree.map(lambda p, m: p - rate * m, state.params, momentum)
    new = State(
        jax.tree.map(choose, params, state.params),
        jax.tree.map(choose, momentum, state.momentum),
        choose(memory, state.memory),
        state.key,
        state.step + 1,
    )
    return new, {"loss": loss, "finite": finite}


class Data:
    """Batches that depend on their number alone."""

    def __init__(self, options: dict[str, Any]):
        self.position, self.options = 0, options

    def __next__(self) -> np.ndarray:
        if self.position >= self.options.get("batches", 10**9):
            raise StopIteration
        time.sleep(self.options.get("sleep", 0))
        shape = (BATCH, self.options.get("size", 16))
        x = np.random.default_rng(self.position).normal(size=shape).astype(np.float32)
        self.position += 1
        if self.position in self.options.get("nan_steps", []):
            x[0, 0] = np.nan
        return x

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main(run_dir: Path, options: dict[str, Any]) -> int:
    if options.get("processes"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{options['port']}"
        jax.distributed.initialize(address, options["processes"], options["process"])
    if "room_seconds" in options:
        training_loop.ROOM_SECONDS = options["room_seconds"]
        training_loop.RETRY_SECONDS = options["room_seconds"] / 5
    rate, size = options.get("rate", 0.05), options.get("size", 16)
    loop = {name: options[name] for name in LOOP_FIELDS if name in options}
    for name in {"profile", "writers"} & {*loop}:
        loop[name] = tuple(loop[name])

    def evaluate(state: State, should_stop: Any) -> dict[str, float]:
        print("evaluating", flush=True)
        deadline = time.monotonic() + options.get("evaluate_sleep", 0)
        while time.monotonic() < deadline and not should_stop():
            time.sleep(0.02)
        return {"weight": float(state.params["w"][0, 0])}

    state = init(size)
    if options.get("processes"):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = jax.jit(lambda: init(size), out_shardings=spec)()
    state, outcome = train(
        lambda s, x: train_step(s, x, rate, options.get("compile_sleep", 0.0)),
        state,
        Data(options),
        LoopConfig(**loop),
        run_dir,
        config_record={"model": {"size": size}, "rate": rate, "loop": loop},
        tokens_per_step=BATCH,
        evaluate=evaluate,
    )
    plain = state._replace(key=jax.random.key_data(state.key))
    leaves = [np.asarray(jax.device_get(leaf)) for leaf in jax.tree.leaves(plain)]
    (as_path(run_dir) / "final.bin").write_bytes(
        b"".join(leaf.tobytes() for leaf in leaves)
    )
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
