"""What a read of M+ is given beside the memory and its tokens, and its checks."""

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Array, Int

from memjax.models import ragged as segments
from memjax.models.mplus.state import MPlusState

if TYPE_CHECKING:
    from memjax.models.mplus.model import MPlus


class Given(NamedTuple):
    """What a read is given beside its tokens; see `MPlus.read`."""

    new: Array | None
    beside_pool: bool
    kept: Array | None
    prompt: int | None
    room: int

    @property
    def alone(self) -> bool:
        """Whether the tokens read the new memory and nothing else."""
        return self.new is not None and not self.beside_pool


def check(
    model: "MPlus", state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> None:
    """Raises ValueError on what `MPlus.read` refuses."""
    segments.check_tokens(tokens, state.held.shape[0], model.vocab_size)
    b, t = tokens.shape
    if given.beside_pool and given.new is None:
        raise ValueError("beside_pool needs new memory, got new=None")
    count = 0
    if given.new is not None:
        count = given.new.shape[2]
        model.check_rows("new", given.new, b, count)
        if not 1 <= count <= model.config.pool:
            raise ValueError(
                f"new must have 1 to N={model.config.pool} rows, got {count}"
            )
    if given.kept is not None:
        shape = (b, model.layers, model.config.pool - count)
        if not given.beside_pool or given.kept.shape != shape:
            raise ValueError(
                f"kept must be [B, L, N - n] = {list(shape)}, with beside_pool, "
                f"got {list(given.kept.shape)}, beside_pool={given.beside_pool}"
            )
    if given.prompt is not None and model.config.by_attention:
        raise ValueError(
            "prompt must be None with retrieval='attention', where no token chooses "
            f"for another, got {given.prompt}"
        )
    if given.prompt is not None and not 1 <= given.prompt <= t:
        raise ValueError(f"prompt must be in [1, T={t}], got {given.prompt}")
    if given.room < 0:
        raise ValueError(f"room must be at least 0, got {given.room}")
