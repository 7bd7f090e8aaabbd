"""Facts, text and tiny models that the tests of M+'s studies share."""

import functools
from typing import Any

import jax

from experiments.mplus.samples import choose_facts, make_samples
from memjax.data import Passage, Question, load_tokenizer, pick_facts
from memjax.models import LanguageModel
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from tests.tiny import drawn, make_config

BYTES = load_tokenizer("bytes")
#: Tokens of a chunk and of an answer; K memory tokens.
CHUNK, ANSWER, ROWS = 48, 6, 8
NAMES = ["Arda", "Brys", "Coln", "Dorn", "Esse", "Fahl", "Gont", "Hyle", "Irth", "Juln"]
FACTS = [
    Question(
        f"The river of {name} is {i * 37:03}.",
        f"Question: Which? Answer: The river of {name} is",
        f"{i * 37:03}",
        f"kind {i % 2}",
        name,
    )
    for i, name in enumerate(NAMES)
]
# Of 42 tokens with what is between them; eight of the ten subjects have one.
PASSAGES = [[Passage(f"{name} " * 8) for name in NAMES[:8]], [Passage("z" * 400)]]
MEMORY = MPlusConfig(
    num_memory_tokens=ROWS,
    pool_size=16,
    chunk_size=CHUNK,
    num_retrieved=8,
    store_size=32,
    key_dim=4,
    rank=2,
)


@functools.cache
def backbone() -> LanguageModel:
    config = make_config(256, capacity=400, num_layers=1)
    return drawn(lambda: LanguageModel(config, key=jax.random.key(0)))


@functools.cache
def memory_model(seed: int = 0):
    """M+ around the backbone."""
    plain = backbone()
    return drawn(lambda: add_mplus(plain, MEMORY, key=jax.random.key(1)), seed)


def samples(samples=4, num_chunks=3, **options: Any):
    """Of facts in random order."""
    sizes, facts = {"batch": 2}, pick_facts(FACTS, seed=0)
    chosen = choose_facts(facts, BYTES, samples=samples, **sizes, **options)
    sizes |= {"num_chunks": num_chunks, "chunk": CHUNK}
    return make_samples(chosen, PASSAGES, BYTES, **sizes)
