"""What M+ and its backbone compute, by formula: products of matrices alone.

Two operations a multiplication and addition; causal attention counts what it may see,
scores and values alike. Norms, RoPE, softmax, the choice of rows and the embedding are
left out, and so are logits of tokens that are not followed by a drawn one.
"""

from memjax.models import ModelConfig
from memjax.models.mplus.config import MPlusConfig


def text(
    sizes: ModelConfig, before: int, tokens: int, window: int | None = None
) -> float:
    """Reading tokens after earlier ones; attention sees a window, or all."""
    seen = _causal(before, tokens, window)
    return _dense(sizes, tokens) + _attention(sizes, seen)


def answer(
    sizes: ModelConfig, before: int, prompt: int, drawn: int, window: int | None = None
) -> float:
    """Reading a prompt after other tokens and sampling; the last token is not read."""
    reads = text(sizes, before, prompt + drawn - 1, window)
    return reads + _head(sizes, drawn)


def inject(sizes: ModelConfig, memory: MPlusConfig, tokens: int) -> float:
    """Writing whole chunks into memory.

    The K old rows and bos are keys and values alone; of the last layer only the K new
    rows are needed, or nothing where layers' inputs are stored. K rows leave the pool
    and get keys of the retriever.
    """
    k, c = memory.num_memory_tokens, memory.chunk_size
    deep = 1 - 1 / _depth(sizes)
    chunk = deep * _layers(sizes, memory, c, 1 + k)
    chunk += deep * _attention(sizes, _causal(1 + k, c))
    if memory.stored == "output":
        last = _layers(sizes, memory, k, 1 + c) + _attention(sizes, _causal(1 + c, k))
        chunk += last / _depth(sizes)
    if memory.num_retrieved:
        chunk += _projected(sizes, memory, k)
    return tokens // c * chunk


def read(sizes: ModelConfig, memory: MPlusConfig, prompt: int, drawn: int) -> float:
    """Answering with the memory, whose store is searched whole, filled or not.

    Raises:
        ValueError: if the memory uses attention retrieval, which is not counted here.
    """
    if memory.by_attention:
        raise ValueError("memory.retrieval must be 'learned', got 'attention'")
    tokens = prompt + drawn - 1
    found = _layers(sizes, memory, tokens, memory.prefix)
    found += _attention(sizes, tokens * memory.prefix + _causal(0, tokens))
    if memory.num_retrieved:
        searched = prompt * memory.store_size * memory.key_dim
        found += _projected(sizes, memory, prompt) + 2 * _depth(sizes) * searched
    return found + _head(sizes, drawn)


def _depth(sizes):
    return sizes.num_layers


def _matrices(sizes):
    """In and out of all in a layer: keys and values, queries and gates, the others."""
    d, f = sizes.model_dim, sizes.hidden_dim
    heads = sizes.heads.num_heads * sizes.heads.head_dim
    key_heads = sizes.heads.num_kv_heads * sizes.heads.head_dim
    return [(d, key_heads)] * 2, [(d, heads), (d, f), (d, f), (f, d)], [(heads, d)]


def _dense(sizes, rows):
    products = [x * y for part in _matrices(sizes) for x, y in part]
    return 2.0 * _depth(sizes) * rows * sum(products)


def _layers(sizes, memory, rows, prefix):
    """All matrices for `rows`, for a prefix those of keys and values; with adapters."""
    first, rest, output = _matrices(sizes)
    adapter = lambda part: memory.rank * sum(x + y for x, y in part)
    plain = lambda part: sum(x * y for x, y in part)
    both = (rows + prefix) * (plain(first) + adapter(first))
    both += rows * (plain(rest) + adapter(rest) + plain(output))
    return 2.0 * _depth(sizes) * both


def _attention(sizes, seen):
    return 4.0 * _depth(sizes) * sizes.heads.num_heads * sizes.heads.head_dim * seen


def _causal(before, tokens, window=None):
    """Keys that the queries see in all."""
    growing = tokens
    if window is not None:
        growing = min(tokens, max(0, window - before))
    grown = growing * before + growing * (growing + 1) // 2
    return grown + (tokens - growing) * (window or 0)


def _projected(sizes, memory, rows):
    """The retriever's two matrices, for so many rows of a layer."""
    hidden = 2 * memory.key_dim
    return 2.0 * _depth(sizes) * rows * hidden * (sizes.model_dim + memory.key_dim)


def _head(sizes, drawn):
    return 2.0 * sizes.model_dim * sizes.vocab_size * drawn
