"""Key tokens against a loop over contexts, and LongPPL of them."""

import importlib
import io
from typing import Any

import chex
import jax
import numpy as np
import pytest
import tokenizers

from memjax import evaluation
from memjax.data import load_tokenizer
from memjax.data.documents.tokenizer import parse_tokenizer
from memjax.data.documents.tokens import TokenisedDocument
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig, add_hmt
from memjax.models.loss import scored_mask
from tests import tiny

# The module, whose function the tests count calls of.
key_tokens = importlib.import_module("memjax.evaluation.key_tokens")

BYTES, PIECES = load_tokenizer("bytes"), load_tokenizer("bpe4k")
CONFIG = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=32),),
    num_layers=1,
    vocab_size=256,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
MODEL = tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))
TEXTS = ("one two, one two, one.", "é né, né", "x", "")
K, STRIDE, ALPHA, BETA = 5, 3, 0.001, -5.6
SETTINGS: dict[str, Any] = dict(short_context=K, stride=STRIDE, alpha=ALPHA, beta=BETA)
CALLS: dict[str, Any] = dict(tokens_per_call=8, batch_size=2)


def tokenised(tokenizer):
    return [
        TokenisedDocument(f"text {i}", "note", tokenizer.encode(text))
        for i, text in enumerate(TEXTS)
    ]


DOCUMENTS = tokenised(BYTES)


@pytest.fixture(name="find")
def _find(tmp_path):
    def find(documents=DOCUMENTS, **options):
        given: dict[str, Any] = SETTINGS | CALLS
        given |= dict(tokenizer=BYTES, cache_dir=tmp_path) | options
        return evaluation.find_key_tokens(MODEL, documents, **given)

    return find


def log_probability(logits, context, target):
    # Behind its end, so that all contexts share a program.
    padded = np.pad(context, (0, 32 - len(context)))[None]
    scores = np.asarray(logits(padded)[0, len(context) - 1], np.float64)
    return scores[target] - np.log(np.exp(scores).sum())


def test_key_tokens_are_those_that_need_the_long_context(find, monkeypatch):
    keys = find()
    logits = jax.jit(lambda tokens: MODEL(MODEL.init_state(1), tokens)[1])
    for document, key in zip(DOCUMENTS, keys.keys, strict=True):
        tokens = document.tokens
        for t in range(len(tokens)):
            # STRIDE tokens share a beginning of their short contexts.
            start = (t - K) // STRIDE * STRIDE
            needed = False
            if t >= K:
                long = log_probability(logits, tokens[:t], tokens[t])
                short = log_probability(logits, tokens[start:t], tokens[t])
                needed = long - short > ALPHA and long > BETA
            assert key[t] == needed, (document.name, t)
    assert 0 < keys.total < sum(len(key) for key in keys.keys)

    # Found once: of the same documents and settings they are read.
    monkeypatch.setattr(key_tokens, "token_losses", None)
    again = find()
    chex.assert_trees_all_equal(again, keys)
    with pytest.raises(TypeError, match="not callable"):
        find(alpha=0.5)


def test_a_damaged_file_of_keys_is_named(find, tmp_path):
    find()
    (file,) = tmp_path.glob("key_tokens/*.npy")
    content = file.read_bytes()
    short = io.BytesIO()
    np.save(short, np.zeros(1, np.uint8))
    for wrong in (b"", b"x" * 200, content[:-1], short.getvalue()):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"{file} is damaged, remove it"):
            find()
    file.write_bytes(content)
    with pytest.raises(ValueError, match="tokens_per_call must be"):
        find(tokens_per_call=0)


@pytest.mark.parametrize("context_length", [0, 9])
def test_long_perplexity_is_that_of_key_tokens(find, context_length):
    """Whatever texts the documents are cut into: the keys are of tokens."""
    keys = find()
    cut = dict(context_length=context_length)
    losses = evaluation.token_losses(MODEL, DOCUMENTS, **cut, **CALLS)
    kept = evaluation.keep_key_tokens(
        losses, keys, DOCUMENTS, tokenizer=BYTES, least=1, **cut
    )
    # The targets of all texts in order are all tokens but the first of a document.
    flat = losses.nll[losses.mask > 0]
    chosen = np.concatenate([key[1:] for key in keys.keys])
    np.testing.assert_allclose(
        evaluation.perplexity(kept), np.exp(flat[chosen].mean()), rtol=1e-6
    )


def llama():
    """A tokenizer with spaces as Llama 2 has them, and bytes for other characters."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += [*"▁onetw,", "▁o", "ne"]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    merges = [("▁", "o"), ("n", "e")]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("▁"),
            tokenizers.normalizers.Replace(" ", "▁"),
        ]
    )
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return parse_tokenizer(made.to_str().encode(), "llama")


@pytest.mark.parametrize("other", [PIECES, llama()])
def test_keys_of_another_tokenizer_are_of_the_same_bytes(find, other):
    keys, others = find(), evaluation.retokenise(DOCUMENTS, BYTES, other)
    chex.assert_trees_all_equal(others, tokenised(other))
    wanted = [np.zeros(len(key), bool) for key in keys.keys]
    wanted[0][4:8] = True  # "two," of the first text
    wanted[1][:2] = True  # both bytes of the first "é"
    keys = keys._replace(keys=tuple(wanted))
    found = evaluation.align_key_tokens(keys, DOCUMENTS, BYTES, others, other)
    # Pieces whose text ends behind the marked characters, and begins in them.
    for text, first, last in ((0, 4, 8), (1, 0, 1)):
        ids = others[text].tokens
        ends = [len(other.decode(ids[: i + 1])) for i in range(len(ids))]
        inside = [
            first <= start and end <= last
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        # Llama's first token is the space that is taken away.
        inside[0] &= ends[0] > 0
        np.testing.assert_array_equal(found.keys[text], inside)
        assert any(inside)
    back = evaluation.align_key_tokens(found, others, other, DOCUMENTS, BYTES)
    assert not any((a & ~b).any() for a, b in zip(back.keys, keys.keys, strict=True))
    assert back.total > 0


def test_texts_in_other_tokens_have_the_keys_of_whole_ones(find, tmp_path):
    # Behind the first contexts all are key tokens.
    every = dict(alpha=-1e9, beta=-1e9)

    def by(texts, tokenizer):
        given = SETTINGS | CALLS | dict(cache_dir=tmp_path) | every
        return evaluation.key_tokens_by(MODEL, BYTES, texts, tokenizer, **given)

    chex.assert_trees_all_equal(by(DOCUMENTS, BYTES), keys := find(**every))
    others = evaluation.retokenise(DOCUMENTS, BYTES, PIECES)
    wanted = evaluation.align_key_tokens(keys, DOCUMENTS, BYTES, others, PIECES)
    chex.assert_trees_all_equal(by(others, PIECES), wanted)
    # The second text from the second byte of its first character on.
    pieces: Any = PIECES
    ids = [pieces.backend.token_to_id("©"), *PIECES.encode(" né, né")]
    inside = others[1]._replace(tokens=np.array(ids, np.int32))
    found = by([others[0], inside, *others[2:]], PIECES)
    chex.assert_trees_all_equal(found.keys[0], wanted.keys[0])
    assert len(found.keys[1]) == len(ids) and not found.keys[1].any()
    assert found.content == key_tokens.digest_of([others[0], inside, *others[2:]])
    assert wanted.keys[0].any() and wanted.keys[1].any()


def test_no_target_that_the_reference_has_seen_is_a_key(tmp_path):
    model = add_hmt(MODEL, tiny.HMT, key=jax.random.key(1))
    every: dict[str, Any] = (
        SETTINGS | CALLS | dict(alpha=-1e9, beta=-1e9, cache_dir=tmp_path)
    )
    found = evaluation.find_key_tokens(model, DOCUMENTS, tokenizer=BYTES, **every)
    longest = max(map(len, found.keys))
    seen = np.asarray(scored_mask(longest, model.window, model.first_scored)) == 0
    for key in found.keys:
        # A target is the token behind its position.
        assert not (key[1:] & seen[: max(len(key) - 1, 0)]).any()
    assert seen.any() and found.total


def test_tokens_that_no_bytes_are_written_as_are_read_as_text():
    """As the library reads them: GPT-2's bytes have no space."""
    ids = {"a": 0, "b c": 1, "Ġ": 2}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = parse_tokenizer(made.to_str().encode(), "spaces")
    text = DOCUMENTS[0]._replace(tokens=(pieces := np.array([0, 2, 1], np.int32)))
    (found,) = evaluation.retokenise([text], tokenizer, BYTES)
    np.testing.assert_array_equal(found.tokens, BYTES.encode("a b c"))
    assert tokenizer.decode(pieces) == "a b c"


def test_what_cannot_be_measured_is_refused(find):
    with pytest.raises(ValueError, match="longest of 4 has 22 tokens"):
        find(context_length=23)
    with pytest.raises(ValueError, match="short_context must be below the 21 tokens"):
        find(short_context=21)
    with pytest.raises(ValueError, match="reference has 256 ids and tokenizer 4096"):
        find(tokenizer=PIECES)
    with pytest.raises(ValueError, match="alpha must be a number, got nan"):
        find(alpha=float("nan"))
    with pytest.raises(ValueError, match="cache_dir must be a folder that can be wr"):
        find(cache_dir=__file__)
    for wrong in ([0, 256], [-1, 5], [0.5, 1.0]):
        other = DOCUMENTS[0]._replace(tokens=np.array(wrong * 9))
        with pytest.raises(ValueError, match=r"\[0, 256\), got 'text 0' with"):
            find([*DOCUMENTS[1:], other])
    keys = find()
    losses = evaluation.token_losses(MODEL, DOCUMENTS, **CALLS)

    def keep(documents=DOCUMENTS, losses=losses, **options):
        given: dict[str, Any] = dict(tokenizer=BYTES) | options
        return evaluation.keep_key_tokens(losses, keys, documents, **given)

    with pytest.raises(ValueError, match=r"align_key_tokens\(keys, documents"):
        keep(tokenizer=PIECES)
    with pytest.raises(ValueError, match="least=100 key tokens are needed, got"):
        keep()
    with pytest.raises(ValueError, match="least must be at least 1, got 0"):
        keep(least=0)
    with pytest.raises(ValueError, match="documents must be those of the keys"):
        keep(documents=DOCUMENTS[:2])
    inside = [DOCUMENTS[1]._replace(tokens=DOCUMENTS[1].tokens[1:])]
    with pytest.raises(ValueError, match="whole characters, 'text 1' is not"):
        evaluation.retokenise(inside, BYTES, PIECES)
    with pytest.raises(ValueError, match=r"losses must be \[5, 9\]"):
        keep(context_length=9)
