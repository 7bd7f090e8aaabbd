"""Generate tokens: read the prompt into the state, then draw and read one by one.

Programs have few shapes: a prompt is read in calls, the last one padded to a power
of two, and tokens are drawn in a loop of dynamic length.

Shapes: B batch, T time, N drawn tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from memjax.checks import check_key, check_sizes, require_all, require_instance, short
from memjax.models.base import Model, commit_state
from memjax.models.ragged import check_prompt
from memjax.models.sampling import Sampling, Seen, Settings, draw

# Tokens drawn by one call of the program, between which a cache may grow.
PIECE = 64
# Tokens to draw that a cache gets slots for at once.
RESERVED = 4096
# Minimum length of a prompt's last call, with padding.
LEAST_PER_CALL = 16


class Generated(NamedTuple):
    """Result of `generate`.

    Attributes:
        state: the memory after the prompt and every token that was drawn.
        tokens: drawn; 0 behind a batch element's end.
        lengths: tokens of each batch element, the one that ended it included.
        log_probs: of each token, by the model's own distribution (temperature 1, no
            token left out); 0 behind the end.
    """

    state: PyTree
    tokens: Int[np.ndarray, "B N"]
    lengths: Int[np.ndarray, " B"]
    log_probs: Float[np.ndarray, "B N"]


class _Open(NamedTuple):
    """Loop state of decoding, without the memory."""

    features: Float[Array, "B E"]  # behind the last token
    key: PRNGKeyArray
    drawn: Int[Array, ""]  # tokens so far, of those that have not ended
    done: Bool[Array, " B"]
    seen: Seen | None


def generate(
    model: Model,
    state: PyTree | None,
    prompt: Int[np.ndarray, "B T"] | Int[Array, "B T"],
    max_new_tokens: int,
    *,
    key: PRNGKeyArray,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    lengths: Sequence[int] | None = None,
    read_before: Sequence[int] = (),
    vocab_size: int | None = None,
    stop_tokens: Sequence[int] = (),
    stop_when: Callable[[Int[np.ndarray, "B n"]], Any] | None = None,
    samples: int = 1,
    tokens_per_call: int = 1024,
    least_per_call: int = LEAST_PER_CALL,
    donate: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Generated:
    """Reads the prompt into the state and draws tokens one by one.

    A memory of fixed size bounds neither the prompt nor the output; full attention
    grows its cache up to its capacity.

    Args:
        model: the model.
        state: the memory to go on from; None is an empty one.
        prompt: tokens in [0, V), T >= 1.
        max_new_tokens: how many to draw at most, at least 1.
        key: of the draws. The same key draws the same tokens for any max_new_tokens.
        sampling: see `Sampling`.
        lengths: tokens of each batch element's prompt, 1 to T; None is T. Tokens behind
            them are not read; without lengths all are, those of padding too.
        read_before: tokens in the state that `sampling.repetition_penalty` counts as
            it does the prompt's.
        vocab_size: of the tokenizer: tokens from here on, with which a vocabulary is
            padded, are not drawn. None is the model's.
        stop_tokens: tokens that end a batch element, as the end of a text.
        stop_when: called with all tokens so far after each one; True, or True for a
            batch element, ends it. The place to print a stream, or to look for stop
            strings: see `stop_strings`.
        samples: texts drawn for each prompt, which is read once; they are neighbours
            in the batch, which is `samples` times as large.
        tokens_per_call: of the prompt, read at a time; a multiple of the model's window
            is quick.
        least_per_call: minimum length of the prompt's last call, with padding. Where it
            is `tokens_per_call`, one program reads prompts of all lengths.
        donate: whether the state's memory may be taken for the result's. The state
            that was given cannot be used again.
        progress: called as the prompt is read, with its tokens so far and in total.

    Raises:
        ValueError: on an empty prompt, a token or length out of range, a size below 1,
            more tokens than full attention has capacity for, or logits that are NaN.
    """
    check_key(key)
    check_prompt(model, prompt, lengths, max_new_tokens, tokens_per_call, samples)
    require_instance("sampling", sampling, Sampling)
    if vocab_size is not None:
        check_sizes(vocab_size=vocab_size)
    # One that cannot be drawn would never end a text.
    stop = _known_tokens(model, "stop_tokens", stop_tokens)
    known = _known_tokens(model, "read_before", read_before)
    tokens = np.asarray(prompt)
    if state is None:
        state, donate = model.init_state(len(tokens), capacity=1), True
    needed, room = tokens.shape[1] + max_new_tokens, model.remaining(state)
    if room is not None and needed > room:
        raise ValueError(
            f"prompt and max_new_tokens make {needed} tokens to read; full attention "
            f"has room for {room} more"
        )
    # One size of its cache for the whole call, if it is not large.
    state = model.reserve(state, min(needed, tokens.shape[1] + RESERVED))
    ends = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    sizes = (tokens_per_call, least_per_call)
    state, features = _read_prompt(
        model, state, tokens, np.asarray(ends), sizes, donate, progress
    )
    seen = None
    if sampling.penalises:
        read = _read_tokens(tokens, ends, known, model.vocab_size)
        seen = Seen.of(sampling, read)
    if samples > 1:
        state, features, seen = jax.tree.map(
            lambda leaf: jnp.repeat(leaf, samples, axis=0), (state, features, seen)
        )
    open_ = _Open(features, key, jnp.int32(0), jnp.zeros(len(features), bool), seen)
    settings = Settings.of(sampling, vocab_size)
    return _draw_all(
        model, state, open_, settings, max_new_tokens, jnp.int32(stop), stop_when
    )


def stop_strings(
    decode: Callable[[np.ndarray], str], strings: Sequence[str]
) -> Callable[[Int[np.ndarray, "B n"]], np.ndarray]:
    """A `stop_when` that ends a batch element at one of the strings.

    Args:
        decode: of a tokenizer.
        strings: none of them empty.

    Raises:
        ValueError: on no string, or an empty one.
    """
    require_all("strings", strings, str)
    if not strings or not all(strings):
        raise ValueError(f"strings must be at least one and not empty, got {strings}")

    def found(tokens):
        texts = (decode(row) for row in tokens)
        return np.array([any(s in text for s in strings) for text in texts])

    return found


def read_text(
    model: Model,
    state: PyTree,
    tokens: Int[np.ndarray, "B T"] | Int[Array, "B T"],
    *,
    tokens_per_call: int = 1024,
    donate: bool = False,
) -> PyTree:
    """The memory after a text of any length, read in calls of few shapes.

    Args:
        model: the model.
        state: the memory to go on from.
        tokens: in [0, V), T >= 1.
        tokens_per_call: as in `generate`.
        donate: as in `generate`.

    Raises:
        ValueError: on an empty text, a token out of range, a size below 1, or more
            tokens than full attention has room for.
    """
    check_prompt(model, tokens, None, 1, tokens_per_call, 1)
    tokens = np.asarray(tokens)
    state = model.reserve(state, tokens.shape[1])
    ends = np.full(len(tokens), tokens.shape[1])
    sizes = (tokens_per_call, LEAST_PER_CALL)
    return _read_prompt(model, state, tokens, ends, sizes, donate)[0]


def _read_prompt(model, state, tokens, ends, sizes, donate, progress=None):
    """The memory after the prompts, and the features behind their last tokens."""
    most, least = sizes
    # Split, so that parameters are arguments of the programs.
    graph, params = nnx.split(model)
    batch, longest = tokens.shape
    state, features = commit_state(params, state), jnp.zeros((batch, 0))
    # One call at a time: memory does not grow with the prompt.
    for start in range(0, longest, most):
        count = np.clip(ends - start, 0, most).astype(np.int32)
        state = model.reserve(state, int(count.max()))
        # Padding is not read, but a call cannot be longer than a cache.
        room = model.remaining(state) or most
        left = longest - start
        padded = _padded(left, longest, least) if model.can_pad else left
        size = min(most, room, padded)
        part = np.zeros((batch, size), np.int32)
        part[:, :left] = tokens[:, start : start + size]
        # Without lengths it is another program.
        whole = (count == size).all() and (least < most or not model.can_pad)
        lengths = None if whole else jnp.asarray(count)
        # From the second call on the state is one that this function made.
        read = _read[donate or start > 0]
        state, new = read(graph, params, state, jnp.asarray(part), lengths)
        # But of a prompt that ended in an earlier call.
        goes_on = count[:, None] > 0
        features = new if goes_on.all() else jnp.where(goes_on, new, features)
        if progress is not None:
            # A call returns before it is computed.
            jax.block_until_ready(features)
            progress(min(start + most, longest), longest)
    return state, features


def _known_tokens(model, name, tokens):
    """The tokens as an array; ValueError unless they are of the model."""
    found = np.ravel(tokens) if np.size(tokens) else np.zeros(0, int)
    if found.dtype.kind not in "iu" or np.any(
        (found < 0) | (found >= model.vocab_size)
    ):
        raise ValueError(
            f"{name} must be in [0, {model.vocab_size}), got {short(tokens)}"
        )
    return found


def _read_tokens(tokens, ends, before, vocab_size):
    """Whether each token was read, [B, V]."""
    read = np.zeros((len(tokens), vocab_size), bool)
    read[:, before] = True
    for row, prompt, end in zip(read, tokens, ends, strict=True):
        row[prompt[:end]] = True
    # On the host: each length of a prompt would be another program.
    return jnp.asarray(read)


def _draw_all(model, state, open_, settings, limit, stop, stop_when):
    """Draws until all batch elements have ended, or to the limit; donates the state."""
    graph, params = nnx.split(model)
    # Else a second call, which goes on from results of the first, compiles again.
    open_ = commit_state(params, open_)
    batch, parts = len(open_.done), []
    # Ended batch elements read nothing more, while others go on.
    ragged = batch > 1 and (stop.size > 0 or stop_when is not None)
    size = PIECE if stop_when is None else 1
    taken, ended = 0, np.zeros(batch, bool)
    while taken < limit and not ended.all():
        count = min(size, limit - taken)
        state = model.reserve(state, count)
        state, open_, *drawn = _draw(
            graph, size, ragged, params, state, open_, settings, stop, jnp.int32(count)
        )
        parts.append([np.asarray(x)[:, :count] for x in drawn])
        taken, ended = taken + count, np.asarray(open_.done)
        if stop_when is not None:
            so_far = np.concatenate([tokens for tokens, *_ in parts], axis=1)
            ended = ended | np.asarray(stop_when(so_far), bool)
            done = jnp.asarray(np.broadcast_to(ended, batch))
            open_ = commit_state(params, open_._replace(done=done))
    tokens, log_probs, live = (
        np.concatenate(part, axis=1) for part in zip(*parts, strict=True)
    )
    if np.isnan(log_probs).any():
        raise ValueError("the model's logits are NaN: nothing can be drawn from them")
    lengths = live.sum(axis=1)
    longest = lengths.max()
    return Generated(state, tokens[:, :longest], lengths, log_probs[:, :longest])


def _padded(length: int, longest: int, least: int) -> int:
    """The next power of two; a whole prompt of one token stays one."""
    # A model may read a single token as a drawn one, as HMT does.
    return 1 if longest == 1 else max(least, 1 << (length - 1).bit_length())


def _read_call(graph, params, state, tokens, lengths):
    """The memory after the tokens, and the features behind the last of them."""
    model = nnx.merge(graph, params)
    if lengths is None:
        state, features = model.features(state, tokens)
        return state, features[:, -1]
    state, features = model.features(state, tokens, lengths=lengths)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return state, jnp.take_along_axis(features, last, axis=1)[:, 0]


def _draw_tokens(graph, size, ragged, params, state, open_, settings, stop, count):
    """Draws `count` tokens, fewer where all end, and reads each into the memory."""
    model = nnx.merge(graph, params)
    batch = len(open_.done)

    def body(loop):
        i, state, open_, (tokens, log_probs, live) = loop
        alive = ~open_.done
        key = jax.random.fold_in(open_.key, open_.drawn)
        logits = model.logits(open_.features)
        token = draw(logits, key, settings, open_.seen)
        scores = jax.nn.log_softmax(logits, axis=-1)
        log_prob = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
        rows = (jnp.where(alive, token, 0), jnp.where(alive, log_prob, 0.0), alive)
        kept = jax.tree.map(
            lambda all_, row: jax.lax.dynamic_update_index_in_dim(all_, row, i, 1),
            (tokens, log_probs, live),
            rows,
        )
        reads = dict(lengths=alive.astype(jnp.int32)) if ragged else {}
        state, features = model.features(state, rows[0][:, None], **reads)
        open_ = _Open(
            features[:, -1],
            open_.key,
            open_.drawn + 1,
            open_.done | jnp.isin(token, stop),
            open_.seen and open_.seen.after(token),
        )
        return i + 1, state, open_, kept

    empty = (
        jnp.zeros((batch, size), jnp.int32),
        jnp.zeros((batch, size), jnp.float32),
        jnp.zeros((batch, size), bool),
    )

    def goes_on(loop):
        return (loop[0] < count) & ~loop[2].done.all()

    start = (jnp.int32(0), state, open_, empty)
    _, state, open_, kept = jax.lax.while_loop(goes_on, body, start)
    return state, open_, *kept


# Keeps the state that it is given, or takes it.
_read = (
    jax.jit(_read_call, static_argnums=0),
    jax.jit(_read_call, static_argnums=0, donate_argnums=2),
)
_draw = jax.jit(_draw_tokens, static_argnums=(0, 1, 2), donate_argnums=4)
