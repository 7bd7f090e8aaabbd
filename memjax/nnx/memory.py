"""A mechanism as a layer of a flax model."""

from collections.abc import Generator
from typing import Any

from flax import nnx
from flax.nnx import reprlib
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.config import MechanismConfig, require_config
from memjax.nnx.params import as_arrays, as_params, params_key


class Memory(nnx.Module):
    """A mechanism's parameters; the memory is an argument and a result.

    Example:
        class Layer(nnx.Module):
            def __init__(self, width, *, rngs):
                self.norm = nnx.LayerNorm(width, rngs=rngs)
                self.memory = Memory(TrellisConfig(...), rngs=rngs)

            def __call__(self, state, x):
                state, y = self.memory(state, self.norm(x))
                return state, x + y

    Flax Linen needs no layer of its own:

        params = self.param("memory", mechanism.init_params)
        state, y = mechanism.apply(params, state, x)
    """

    def __init__(
        self,
        config: MechanismConfig,
        *,
        key: PRNGKeyArray | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Draws the parameters.

        Args:
            config: of a mechanism.
            key: of the parameters; or
            rngs: the streams of flax, of which "params" is drawn from.

        Raises:
            ValueError: on both of key and rngs, or neither; on anything but a
                configuration.
        """
        require_config("config", config)
        self.config, self.mechanism = config, config.build()
        params = self.mechanism.init_params(params_key(key, rngs))
        self.params = nnx.data(as_params(params))

    def __nnx_repr__(self) -> Generator[Any, None, None]:
        """Its configuration; the mechanism repeats that for each function."""
        yield reprlib.Object(type(self), same_line=True)
        yield reprlib.Attr("config", self.config)

    def init_state(self, batch: int) -> PyTree:
        """The empty memory of `batch` sequences; every leaf has the batch first."""
        return self.mechanism.init_state(batch)

    def reset(self, state: PyTree, mask: Bool[Array, " B"]) -> PyTree:
        """Empties the memory of the batch elements in `mask`, at a document's start."""
        return self.mechanism.reset(state, mask)

    def __call__(
        self, state: PyTree, x: Float[Array, "B *T D"]
    ) -> tuple[PyTree, Float[Array, "B *T D"]]:
        """Reads a segment [B, T, D], or one token [B, D], into the memory.

        Returns:
            The memory after it, and an output of the shape of x.

        Raises:
            ValueError: on x of other axes, width or batch.
        """
        shape = getattr(x, "shape", type(x).__name__)
        if len(shape) not in (2, 3):
            raise ValueError(f"x must be [B, T, D] or [B, D], got {shape}")
        # By the axes, as a flax module has one `__call__`.
        read = self.mechanism.step if len(shape) == 2 else self.mechanism.apply
        return read(as_arrays(self.params), state, x)
