"""Cases of other libraries' kernels, for `peers`, which says what they take."""

import functools
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import memjax_kernels
from experiments.lab.ops import Shape
from experiments.tpu import cases_ops
from experiments.tpu.case import Case, Program, shape
from memjax.aot import libtpu
from memjax.aot.chips import CHIPS

TIME, WIDTH, TAPS = 8192, 128, 4


def deltanet(q: Any, k: Any, v: Any, beta: Any, g: Any) -> Any:
    """deltanet-tpu as our op; in float32 with norms, as its README advises."""
    norm = q.dtype == jnp.float32
    rule = importlib.import_module("deltanet_tpu").chunk_gdn
    return None, rule(q, k, v, g, beta, scale=1.0, qk_l2norm=norm)


def tokamax(q: Any, k: Any, v: Any, beta: Any, g: Any) -> Any:
    """tokamax as our op; it takes and gives heads first."""
    rule = importlib.import_module("tokamax._src.ops.kda.api").kimi_delta_attention
    first = (jnp.moveaxis(x, 2, 0) for x in (q, k, v, g, beta))
    return None, jnp.moveaxis(rule(*first, scale=1.0, implementation="mosaic")[0], 0, 2)


def fused(peer: str, key_heads: int, heads: int) -> Program:
    """A serving kernel on one sequence."""
    floats = functools.partial(shape, dtype=jnp.float32)
    width = (2 * key_heads + heads) * WIDTH
    gate = (shape if peer == "tokamax" else floats)(TIME, heads)
    states = floats(2, TAPS - 1, width), floats(2, heads, WIDTH, WIDTH)
    weights = floats(width, 1, TAPS), None, floats(heads), floats(heads)
    numbers = (shape(n, dtype=jnp.int32) for n in (2, 1, 3, 1, 1))
    sizes = dict(n_kq=key_heads, n_v=heads, d_k=WIDTH, d_v=WIDTH, kernel_size=TAPS)

    def run(*arrays: Any) -> Any:
        module = {
            "flywheel-tpu": "flywheel_tpu.linear_attention.gdn",
            "tokamax": "tokamax._src.ops.causal_conv1d_gated_delta_rule",
            "tpu-inference": "tpu_inference.kernels.gdn.v3",
        }[peer]
        if peer == "tpu-inference":
            # The package's own head needs vllm.
            package = types.ModuleType("tpu_inference")
            found = importlib.metadata.distribution(peer)
            package.__path__ = [str(found.locate_file("tpu_inference"))]
            sys.modules.setdefault("tpu_inference", package)
        wrapper = importlib.import_module(f"{module}.wrapper")
        return wrapper.fused_conv1d_gdn(*arrays, **sizes)

    arguments = (shape(TIME, width), gate, gate, *states, *weights, *numbers)
    return Program(run, arguments, donated=(3, 4))


def ours(key_heads: int, heads: int) -> Program:
    """Our kernel for what a serving kernel does."""
    floats = functools.partial(shape, dtype=jnp.float32)

    def run(qkv: Any, filters: Any, rates: Any, paces: Any, *decay: Any) -> Any:
        qkv = tuple(x.reshape(1, TIME, -1, WIDTH) for x in qkv)
        before: Any = tuple(jnp.zeros_like(x[:, : TAPS - 1]) for x in qkv)
        rule = memjax_kernels.convolved_gated_delta_rule
        gates = rates, paces, memjax_kernels.Decay(*decay)
        state, last, y = rule(qkv, filters, before, *gates)
        return state, last, y.reshape(1, TIME, -1)

    sizes = (key_heads, key_heads, heads)
    qkv = tuple(shape(1, TIME, n * WIDTH) for n in sizes)
    filters = tuple(floats(TAPS, n, WIDTH) for n in sizes)
    gate, weight = floats(1, TIME, heads), floats(heads)
    return Program(run, (qkv, filters, gate, gate, weight, weight))


def on_chip(build: Callable[[], Program], chip: str) -> Program:
    """A program that is traced as on the chip, of whose kind peers ask jax."""
    pxla: Any = importlib.import_module("jax._src.interpreters.pxla")
    config = importlib.import_module("tokamax.config")
    device = libtpu.devices_of(CHIPS[chip].smallest)[0]
    pxla.get_default_device = lambda: device
    jax.default_backend = lambda: "tpu"
    made = build()

    def function(*arrays: Any) -> Any:
        with config.cross_compile(True):
            return made.function(*arrays)

    return made._replace(function=function)


def table() -> dict[str, Case]:
    """All programs by chip, key and value heads, library, kind and pass."""
    builds: dict[str, Callable[[], Program]] = {}
    for name, op, peer in (
        ("v5e/16/32/memjax/gdn", "gated_delta_rule", None),
        ("v5e/16/16/memjax/kda", "kda", None),
        ("v5e/16/16/memjax/strong", "kda", None),
        ("v5e/16/16/tokamax/kda", "kda", tokamax),
        ("v5e/16/32/deltanet-tpu/gdn", "gated_delta_rule", deltanet),
        ("v6e/16/16/deltanet-tpu/float32", "gated_delta_rule", deltanet),
        ("v6e/16/32/deltanet-tpu/float32", "gated_delta_rule", deltanet),
    ):
        key_heads, heads = map(int, name.split("/")[1:3])
        of = Shape(1, TIME, heads, WIDTH, key_heads)
        dtype = "float32" if "float32" in name else "bfloat16"
        for which, backward in cases_ops.PASSES.items():
            given = (op, of, backward, peer, dtype, float("strong" not in name))
            build = functools.partial(cases_ops.program, *given)
            builds[f"{name}/{which}"] = build
    for peer in ("flywheel-tpu", "tokamax"):
        build = functools.partial(fused, peer, 16, 32)
        builds[f"v5e/16/32/{peer}/fused/forward"] = build
    builds["v5e/16/32/memjax/fused/forward"] = lambda: ours(16, 32)
    build = functools.partial(fused, "tpu-inference", 16, 16)
    builds["v6e/16/16/tpu-inference/fused/forward"] = build
    found = {}
    for name, build in builds.items():
        chip, _, heads, *_ = name.split("/")
        made = functools.partial(on_chip, build, chip)
        found[name] = Case(made, TIME * int(heads), chip=chip)
    return found
