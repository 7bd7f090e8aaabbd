"""M+-Attn: every token and head retrieves rows of the store by its attention scores.

    s_j = q_t · k_j;    token t attends to [bos ; R rows of highest s ; pool ; tokens]

The ablation that M+'s retriever is compared with in section 4.5.2 of Wang et al.
(2025), https://arxiv.org/abs/2502.00592, after H2O. The store holds attention keys and
values instead of hidden states. Each head retrieves R of them for each token, where M+
retrieves R rows per layer for all tokens of a read. It has no parameters.

The authors published no program of it. Choices that the paper leaves open: keys and
values are computed when the pool drops a row, with the adapter that reads; scores are
taken before RoPE, in float32; retrieved rows are between bos and the pool, oldest
first, and get the RoPE positions that follow from it, as in M+.

Shapes: B batch, T tokens, M capacity of the store, R rows of a token and head, S
positions of the KV cache, K dropped rows, D model, G key heads, r query heads of each,
h = G * r, H width of a head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.softmax.dot_product_attention import MAX_SCORES
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import BlockParams
from memjax.models.mplus.layers import memory_slots
from memjax.models.mplus.state import LayerStore, Store
from memjax.models.mplus.store import oldest_first
from memjax.models.mplus.weights import MPlusWeights


def width(config: ModelConfig) -> int:
    """G * H, of a stored row's keys and of its values."""
    return config.heads.num_kv_heads * config.heads.head_dim


def stored(
    config: ModelConfig,
    block: BlockParams,
    rows: Float[Array, "B K D"],
    born: Int[Array, "B K"],
) -> LayerStore:
    """The store's entry for memory tokens: the keys and values of a layer."""
    made = memory_slots(config, block, rows.astype(config.dtype))

    def flat(x):
        return x.reshape(*born.shape, -1).astype(jnp.float32)

    return LayerStore(rows=flat(made.values), keys=flat(made.keys), born=born)


@dataclasses.dataclass(frozen=True)
class AttentionRetriever:
    """Attention with retrieval from the store for each token.

    Attributes:
        config: of the backbone.
        count: R.
        store: of keys and values.
        chosen: [B, T, h, R] of every layer that has attended: indices in the store,
            oldest first; where there are fewer than R rows, unused ones come first.
    """

    config: ModelConfig
    count: int
    store: Store
    chosen: list[Array] = dataclasses.field(default_factory=list)

    @property
    def found(self) -> Int[Array, " B"]:
        """Number of rows that every token and head retrieves: R, or all if fewer."""
        return jnp.minimum(self.store.num_valid, self.count)

    def attend(
        self,
        layer: int,
        plain: Float[Array, "B T h H"],
        query: Float[Array, "B T h H"],
        key: Float[Array, "B S G H"],
        value: Float[Array, "B S G H"],
        before: Int[Array, " B"],
        visible: Bool[Array, "B S"],
    ) -> Float[Array, "B T h H"]:
        """`cached.from_rows`, whose queries attend to the rows they retrieve as well.

        `plain` are the queries before RoPE, which search. Query t attends to the
        visible ones of positions 0 to before + t.
        """
        b, t, h, _ = query.shape
        g, s = key.shape[2], key.shape[1]

        def split(x):
            return jnp.moveaxis(x.reshape(b, t, g, h // g, -1), 1, 0)

        last = before[None] + jnp.arange(t, dtype=jnp.int32)[:, None]
        slots = jnp.arange(s, dtype=jnp.int32)[None]

        def one(token):
            plain, query, last = token
            keys, values, real, chosen = self._retrieve(layer, plain)
            mask = visible & (slots <= last[:, None])
            found = (keys.astype(query.dtype), values.astype(query.dtype), real)
            return _attend(query, found, (key, value, mask)), chosen

        # Process as many tokens at a time as keep scores and rows in bounds.
        # A token's scores over store and cache, and the rows that it reads.
        sizes = self.store.recalls.shape[1] + s + 2 * self.count * query.shape[-1]
        together = max(1, min(t, MAX_SCORES // (b * h * sizes)))
        tokens = (split(plain), split(query), last)
        # The backward pass searches again: kept scores would be M numbers a token and
        # head.
        y, chosen = jax.lax.map(jax.checkpoint(one), tokens, batch_size=together)
        self.chosen.append(jnp.moveaxis(chosen, 0, 1).reshape(b, t, h, self.count))
        return jnp.moveaxis(y, 0, 1).reshape(query.shape)

    def _retrieve(self, layer, plain):
        """Keys after RoPE and values [B, R, G, r, H]; which are real; their indices."""
        store, num_valid = self.store.layers[layer], self.store.num_valid
        b, g, r, _ = plain.shape

        def heads(x):
            return x.reshape(*x.shape[:-1], g, -1)

        scores = jnp.einsum(
            "bgrh,bmgh->bgrm", plain.astype(jnp.float32), heads(store.keys)
        )
        filled = (
            jnp.arange(scores.shape[-1], dtype=jnp.int32)[None] < num_valid[:, None]
        )
        scores = jnp.where(filled[:, None, None], scores, -jnp.inf)
        # The choice has no gradient; the rows chosen are scored again in `_attend`.
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), self.count)
        # top_k puts unused parts of the buffer last; they are moved to the front.
        places, found = jnp.arange(self.count, dtype=jnp.int32)[None], self.found
        # The first `found` of top_k's choice are rows; the others are unused parts.
        real = jnp.broadcast_to(
            (places < found[:, None])[:, None, None], (b, g, r, self.count)
        )
        born = jax.vmap(lambda born, at: born[at])(store.born, chosen)
        order = oldest_first(born, chosen, real)
        chosen = jnp.take_along_axis(chosen, order, axis=-1)
        head = jnp.arange(g, dtype=jnp.int32)[:, None, None]
        take = jax.vmap(lambda x, at: heads(x)[at, head])
        # Unused parts of the buffer may hold anything, and must not give NaN.
        first = self.count - found[:, None]
        real = (places >= first)[..., None, None, None]

        def read(x):
            return jnp.where(real, jnp.moveaxis(take(x, chosen), 3, 1), 0.0)

        # Position 0 is that of bos.
        positions = jnp.maximum(places + 1 - first, 0)
        keys, values = read(store.keys), read(store.rows)
        sizes = self.config.heads
        flat = keys.astype(plain.dtype).reshape(b, self.count, g * r, -1)
        keys = projections.apply_rope(sizes, flat, positions).reshape(keys.shape)
        return keys, values, real[..., 0, 0, 0], chosen


def _attend(query, found, slots):
    """Softmax attention of one token to its retrieved rows and to the KV cache."""
    keys, values, real = found
    key, value, seen = slots

    def product(form, *x):
        return jnp.einsum(form, *x, preferred_element_type=jnp.float32)

    query = query * query.shape[-1] ** -0.5
    scores = [
        product("bgrh,bRgrh->bgrR", query, keys),
        product("bgrh,bsgh->bgrs", query, key),
    ]
    masks = [
        jnp.broadcast_to(x[:, None, None], y.shape)
        for x, y in zip((real, seen), scores, strict=True)
    ]
    scores = jnp.concatenate(scores, axis=-1)
    # Finite, as -inf gives NaN gradients where a token has nothing to attend to.
    scores = jnp.where(jnp.concatenate(masks, axis=-1), scores, -1e30)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    count = keys.shape[1]
    y = product("bgrR,bRgrh->bgrh", weights[..., :count], values)
    y = y + product("bgrs,bsgh->bgrh", weights[..., count:], value)
    return y.astype(query.dtype)


def of_store(weights: MPlusWeights, store: Store | None) -> AttentionRetriever | None:
    """The retriever of a read; None unless retrieval is "attention"."""
    config = weights.config
    if store is None or not config.by_attention:
        return None
    return AttentionRetriever(weights.backbone.config, config.num_retrieved, store)
