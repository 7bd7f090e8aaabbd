"""Lighter tracing and lowering of small programs, for tests and their processes."""

import functools
import gc
import zlib

import jax
from jax._src import compilation_cache
from jax._src.interpreters import mlir

platform_dependent = jax.lax.platform_dependent


@functools.wraps(platform_dependent)
def _cpu_alone(*arrays, default=None, **forms):
    forms.setdefault("cpu", default)
    return platform_dependent(*arrays, cpu=forms["cpu"])


def trace_cpu_alone() -> None:
    """Traces the forms of CPUs; to lower one for another platform is an error.

    To trace a layer's kernels, which no CPU runs, and their gradients takes as long as
    to trace the rest of it.
    """
    jax.lax.platform_dependent = _cpu_alone


def trace_all_platforms() -> None:
    """Traces the forms of all platforms, as programs of users do."""
    jax.lax.platform_dependent = platform_dependent


def lighten() -> None:
    """Makes this process trace and lower small programs faster."""
    # Lines of Python in every operation of a program make it slower to lower.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # To make a context for MLIR takes most of the time that a small program's lowering
    # does; jax makes one for every program.
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    trace_cpu_alone()
    # Programs are kept for minutes: small files are not worth the time.
    if not any(getattr(compilation_cache, x, None) for x in ("zstd", "zstandard")):
        fast = functools.partial(zlib.compress, level=1)
        compilation_cache.compress_executable = fast
    # Tracing makes many objects that live as long as a test.
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
