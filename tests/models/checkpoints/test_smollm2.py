"""SmolLM2-135M, loaded from a GGUF file, against numbers of transformers.

`golden/smollm2.npz` holds logits of 64 tokens in float32 by PyTorch; what made
`golden/smollm2_book.json` is `experiments/common/pretrained_reference.py`.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from experiments.lab.backbones import smollm2
from memjax.data import open_documents
from memjax.models.checkpoints.text_interface import GenerationConfig
from memjax.nnx.params import replace

try:
    FILE = smollm2()
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parents[1] / "golden"
# By the tokenizer of SmolLM2 whose digits stand alone: runs of white space before
# digits are what GPT-2's cut gets wrong.
IDS = {
    "x = 12345": [104, 446, 216, 33, 34, 35, 36, 37],
    "\n\n1 And": [1116, 33, 1350],
    "    12  34": [289, 33, 34, 256, 35, 36],
    "\u00bd\u00b2": [16738, 19133],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "\u00df\U0001d7d8 \u216b \u4e09 \r\n\t \u65e5\u672c\u8a9e don't 'LL\u00a0x  9": [
        *[34878, 23159, 249, 242, 216, 173, 223, 121, 216, 7906, 227, 43902, 17097],
        *[241, 115, 40993, 179, 120, 248, 1326, 982, 637, 16421, 15442, 104, 256, 41],
    ],
}


@pytest.fixture(scope="module", name="pretrained")
def _pretrained():
    return memjax.load(FILE)


@pytest.fixture(scope="module", name="logits")
def _logits(pretrained):
    """Computes logits of up to 128 tokens, padded at the end: attention is causal."""
    # Thirty layers in a loop compile as one.
    scanned = dataclasses.replace(pretrained.model.config, scan_layers=True)
    looped = replace(pretrained.model, config=scanned)

    @jax.jit
    def encode(model, tokens):
        return model.logits(model.encode(model.embed(tokens)))

    def logits(ids):
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(encode(looped, jnp.asarray(tokens)))[0, : len(ids)]

    return logits


def nll(logits, ids):
    scores = logits[:-1].astype(np.float64)
    norm = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1))
    norm += scores.max(-1)
    return norm - np.take_along_axis(scores, np.asarray(ids)[1:, None], 1)[:, 0]


def test_its_sizes(pretrained):
    config = pretrained.model.config
    assert (config.num_layers, config.model_dim, config.vocab_size) == (30, 576, 49152)
    heads = config.heads
    assert (heads.num_heads, heads.num_kv_heads, config.capacity) == (9, 3, 8192)
    leaves = jax.tree.leaves(pretrained.model)
    assert sum(leaf.size for leaf in leaves) == 134_515_008


def test_logits_are_those_of_pytorch(logits):
    golden = np.load(GOLDEN / "smollm2.npz", allow_pickle=False)
    found = logits(golden["ids"])
    np.testing.assert_array_equal(found.argmax(-1), golden["top10"][:, 0])
    found_columns = found[:, golden["cols"]]
    np.testing.assert_allclose(found_columns, golden["logits_cols"], rtol=0, atol=5e-4)
    top = np.take_along_axis(found, golden["top10"], 1)
    np.testing.assert_allclose(top, golden["top10_logits"], rtol=0, atol=5e-4)
    np.testing.assert_allclose(nll(found, golden["ids"]), golden["nll"], atol=5e-4)


def test_perplexity_of_a_book_is_that_of_pytorch(logits, pretrained):
    golden = json.loads((GOLDEN / "smollm2_book.json").read_text())
    # The tokens of the passage are those of the file's own tokenizer.
    settings = golden["config"]
    books = {d.name: d.text for d in open_documents("embedded")}
    text = books[settings["document"]][int(settings["first"]) :][:4096]
    ids = pretrained.tokenizer.encode(text)[:512]
    assert ids.tolist() == golden["ids"]
    # Of the first quarter: to compute takes longer than to compile.
    found, expected = nll(logits(ids[:128]), ids[:128]), golden["nll"]
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-3)
    assert np.exp(np.mean(expected)) == pytest.approx(golden["perplexity"], rel=1e-3)


@pytest.mark.parametrize("text", IDS)
def test_tokenizer_equals_the_files(text, pretrained):
    tokenizer = pretrained.tokenizer
    ids = tokenizer.encode(text)
    assert ids.tolist() == IDS[text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 49152


def test_text_interface_is_kept(pretrained):
    generation = pretrained.text.generation
    assert generation == GenerationConfig(
        eos_ids=(2,),
        bos_id=1,
        pad_id=2,
        source=str(FILE),
        names=generation.names,
    )
    assert "<|im_start|>system" in pretrained.text.chat_template
    assert pretrained.origin == str(FILE)
