"""Folders that memjax writes, read by transformers, and the reverse."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import memjax
from memjax.data import load_tokens
from memjax.data.documents.tokenizer import parse_tokenizer
from memjax.evaluation import perplexity, token_losses
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.models import LanguageModel, preset
from memjax.models.checkpoints.hf.hybrids.fla.layers import FLA
from memjax.models.checkpoints.hf.known_keys import USED, known_keys
from memjax.models.checkpoints.text_interface import TextInterface
from tests import tiny

with warnings.catch_warnings():
    # Both libraries warn of deprecated parts of their own.
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")

# Its threads would wait for each other most of the time.
torch.set_num_threads(1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FAMILIES = Path(__file__).parents[1] / "golden" / "families"


def transformers_logits(folder, tokens):
    """By the model that transformers reads from a folder, all tensors of it used."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


NAMES = sorted(path.name for path in FAMILIES.iterdir())
#: Whole files of all families, and files in parts of two.
FILES = [(10**9, name) for name in NAMES] + [(20_000, "llama3"), (20_000, "opt")]


@pytest.mark.parametrize(("shard_bytes", "name"), FILES)
def test_every_family_has_the_same_logits_in_transformers(name, shard_bytes, tmp_path):
    model = memjax.load(FAMILIES / name).model
    model_type = model.save(tmp_path / "a", shard_bytes=shard_bytes)
    theirs = json.loads((FAMILIES / name / "config.json").read_text())
    assert model_type == theirs["model_type"]
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1 or shard_bytes > 20_000
    golden = np.load(FAMILIES / name / "logits.npz", allow_pickle=False)
    found = transformers_logits(tmp_path / "a", golden["tokens"])
    np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "model_type, changes",
    [
        # As they are trained here: a tied head over a scaled embedding, and windows.
        ("mistral", {}),
        ("llama", {"mechanisms": (AttentionConfig(64, 4, 2, 32, capacity=48),)}),
        (
            "llama",
            {
                "mechanisms": (AttentionConfig(64, 4, 4, 32, capacity=48),),
                "tied_head": False,
            },
        ),
    ],
)
def test_our_own_models_have_the_same_logits_in_transformers(
    model_type, changes, tmp_path
):
    config = preset("transformer-tiny", 64)
    small = {"num_layers": 2, "model_dim": 64, "hidden_dim": 96}
    windows = {"mechanisms": (SlidingWindowConfig(64, 4, 2, 32, window=6),)}
    config = dataclasses.replace(config, **small | windows | changes)
    model = tiny.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))
    assert model.save(tmp_path / "a") == model_type
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 64, jnp.int32)
    ours = jax.jit(lambda m, t: m.logits(m.encode(m.embed(t))))(model, tokens)
    theirs = transformers_logits(tmp_path / "a", tokens)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)


# transformers has none of flash-linear-attention's.
@pytest.mark.parametrize("family", sorted(USED.keys() - FLA.keys()))
def test_every_key_of_its_configs_is_known(family):
    config = transformers.CONFIG_MAPPING[family]()
    assert config.to_dict().keys() <= known_keys(family)


def test_perplexity_equals_transformers_with_the_first_token(tmp_path):
    """As in training and generation, a document begins as the tokenizer begins it."""
    backend = tokenizers.Tokenizer.from_str(tiny.tokenizer().serialised.decode())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 0)]
    )
    text = TextInterface(parse_tokenizer(backend.to_str().encode(), "made"))
    tiny.llama().save(tmp_path / "a", text)
    loaded = memjax.load(tmp_path / "a")
    (tmp_path / "text.txt").write_text("abcdefghijkl")
    spec, cache = str(tmp_path / "text.txt"), tmp_path / "cache"
    documents = load_tokens(spec, loaded.tokenizer, "train", cache)
    found = perplexity(token_losses(loaded.model, documents, tokens_per_call=4))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = np.asarray(theirs("abcdefghijkl").input_ids)
    logits = transformers_logits(tmp_path / "a", ids[None])[0]
    log_probs = jax.nn.log_softmax(logits[:-1])[np.arange(len(ids) - 1), ids[1:]]
    assert ids[0] == 0 and len(ids) == 13
    np.testing.assert_allclose(found, np.exp(-log_probs.mean()), rtol=1e-5)


def test_yarn_beyond_the_first_length_equals_transformers(tmp_path):
    """As Qwen documents it: the factor is added, the length is left."""
    shutil.copytree(FAMILIES / "llama3", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    length = config["max_position_embeddings"]
    config.pop("rope_parameters", None)
    config["rope_scaling"] = dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=length
    )
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    model = memjax.load(tmp_path / "a").model
    tokens = jax.random.randint(
        jax.random.key(1), (1, 4 * length), 0, model.vocab_size, jnp.int32
    )
    _, ours = model(model.init_state(1), tokens)
    theirs = transformers_logits(tmp_path / "a", tokens)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folders_of_transformers_are_read(dtype, tmp_path):
    """Sharded and in half precision, as most checkpoints are."""
    there = transformers.AutoModelForCausalLM.from_pretrained(
        FAMILIES / "llama3", dtype=getattr(torch, dtype)
    )
    there.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert (tmp_path / "a" / "model.safetensors.index.json").exists()
    model = memjax.load(tmp_path / "a").model
    model.save(tmp_path / "b", dtype=dtype)
    tokens = np.load(FAMILIES / "llama3" / "logits.npz", allow_pickle=False)["tokens"]
    before, after = (transformers_logits(tmp_path / folder, tokens) for folder in "ab")
    np.testing.assert_array_equal(before, after)


def test_transformers_reads_the_same_tokenizer(tmp_path):
    """Also where transformers would rather build its family's own."""
    model = memjax.load(FAMILIES / "llama2").model
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    cuts = tokenizers.pre_tokenizers
    made.pre_tokenizer = cuts.Sequence(
        [cuts.Digits(individual_digits=True), cuts.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(cuts.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["one two  12 three\n\n1 four"] * 2, trainer)
    tokenizer = parse_tokenizer(made.to_str().encode(), "made")
    model.save(tmp_path / "a", TextInterface(tokenizer))
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "two  12\n\n1 three"
    assert there.encode(text) == made.encode(text).ids
    assert there.decode(there.encode(text)) == text
