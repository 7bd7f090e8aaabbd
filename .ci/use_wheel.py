"""Uses an installed memjax from a folder that is not its repository."""

import importlib.metadata
import importlib.resources
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import memjax
import memjax_kernels
from memjax.data import load_facts, load_passages, load_tokenizer
from memjax.mechanisms import TrellisConfig

for package in (memjax, memjax_kernels):
    place = Path(str(package.__file__))
    assert place.is_relative_to(sys.prefix), f"{place} is not of this installation"
    assert (importlib.resources.files(package) / "py.typed").is_file()
assert importlib.metadata.version("memjax") == memjax.__version__

config = TrellisConfig(16, num_heads=2, key_dim=8, value_dim=8, slots=8, chunk_size=4)
memory = config.build()
params = memory.init_params(jax.random.key(0))
x = jnp.ones((1, 10, 16))
state, y = jax.jit(memory.apply)(params, memory.init_state(1), x)
assert y.shape == x.shape and bool(jnp.isfinite(y).all())

q = jnp.ones((1, 8, 2, 4))
_, y = jax.jit(memjax_kernels.linear_attention)(q, q, q)
assert y.shape == q.shape

tokenizer = load_tokenizer("bpe4k")
assert tokenizer.decode(tokenizer.encode("It was")) == "It was"
assert load_facts() and load_passages()
print("memjax", memjax.__version__, "works from", Path(memjax.__file__).parent)
