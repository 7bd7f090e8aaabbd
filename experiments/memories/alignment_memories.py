"""The memories that are aligned, at the bytes of 97 or of 33 tokens of SmolLM2.

Those of 33 tokens have one memory for the three query heads that share keys and values.
"""

from typing import NamedTuple

from memjax.models.language_model.retrofit import MemoryName, MemoryOptions


class Memory(NamedTuple):
    """A memory, with sizes of at most the bytes of those keys and values.

    Attributes:
        name: of `add_memory`.
        options: of its sizes.
        started: from the backbone's statistics, or at random.
    """

    name: MemoryName
    options: MemoryOptions = MemoryOptions()
    started: bool = True


MEMORIES: dict[str, Memory] = {
    "Lattice": Memory("lattice", MemoryOptions(slots=32)),
    "Trellis": Memory("trellis", MemoryOptions(slots=14, chunk_size=4)),
    "Elastic, uniform": Memory("elastic", MemoryOptions(order=64)),
    "Elastic, exponential": Memory(
        "elastic", MemoryOptions(order=64, sampling="exponential")
    ),
    "Infini-attention": Memory("infini"),
    "linear attention": Memory("linear_attention"),
    "Mamba-2": Memory("mamba2"),
    "GLA": Memory("gla"),
    "DeltaNet": Memory("deltanet"),
    "Gated DeltaNet": Memory("gated_deltanet"),
    "Gated DeltaNet, random start": Memory("gated_deltanet", started=False),
    "ABC": Memory("abc", MemoryOptions(slots=32)),
    "GSA": Memory("gsa", MemoryOptions(slots=32)),
    "Lattice, shared": Memory("lattice", MemoryOptions("key_value", slots=32)),
    "Trellis, shared": Memory(
        "trellis", MemoryOptions("key_value", slots=14, chunk_size=4)
    ),
    "linear attention, shared": Memory("linear_attention", MemoryOptions("key_value")),
    "Gated DeltaNet, shared": Memory("gated_deltanet", MemoryOptions("key_value")),
    "GSA, shared": Memory("gsa", MemoryOptions("key_value", slots=32)),
}
