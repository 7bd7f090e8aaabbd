"""Trains a model, scores it on held-out documents and draws a sample."""

import jax
import numpy as np
from flax import nnx

from experiments.lab.baselines import ORDER, NGram
from experiments.memories.books_models import Config, run_config, state_bytes
from memjax import evaluation
from memjax.data import TokenisedDocument, load_tokenizer
from memjax.evaluation import TokenLosses
from memjax.models import Sampling, generate
from memjax.training import pretrain as run
from memjax.training import run_data


def test_documents(config: Config) -> list[TokenisedDocument]:
    """Held-out documents, each up to as many texts as are scored of it."""
    settings = run_config(config, "window", 1, config.seed)
    tokenizer = load_tokenizer(settings.data.tokenizer)
    longest = config.test_texts * config.context_length + 1
    return [
        document._replace(tokens=document.tokens[:longest])
        for document in run_data.load_split(settings, tokenizer, "test")
    ]


def train_and_score(config: Config, family: str, steps: int, seed: int) -> dict:
    """Losses, sizes and a sample of one model, which is trained unless it was."""
    settings = run_config(config, family, steps, seed)
    folder = config.run_dir / f"{family}-{seed}"
    outcome = run.train(settings, folder)
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    _, model = run.load_model(folder)
    documents = test_documents(config)
    losses = evaluation.token_losses(
        model,
        documents,
        context_length=config.context_length,
        segment=config.context_length,
        batch_size=8,
    )
    params = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tokenizer = load_tokenizer(settings.data.tokenizer)
    return {
        "losses": losses,
        "parameters": params,
        "state_bytes": state_bytes(settings.model),
        "sample": _sample(config, model, tokenizer, documents[0].tokens),
    }


def _sample(config, model, tokenizer, tokens) -> str:
    """Goes on from the opening of a held-out document, longer than the window."""
    prompt = np.asarray(tokens[: config.context_length // 2])[None]
    drawn = generate(
        model,
        None,
        prompt,
        config.sample_tokens,
        key=jax.random.key(config.seed),
        sampling=Sampling(temperature=0.8, top_p=0.95),
    ).tokens
    head, tail = tokenizer.decode(prompt[0, -60:]), tokenizer.decode(drawn[0])
    return f"...{head} >>> {tail}"


def counted(config: Config) -> TokenLosses:
    """The n-gram on the same texts, each counted from its own beginning."""
    settings = run_config(config, "window", 1, config.seed)
    tokenizer = load_tokenizer(settings.data.tokenizer)
    train = run_data.load_split(settings, tokenizer, "train")
    size = config.context_length
    texts = [
        document._replace(tokens=document.tokens[start : start + size + 1])
        for document in test_documents(config)
        for start in range(0, len(document.tokens) - 1, size)
    ]
    return NGram(train, ORDER, tokenizer.vocab_size).losses(texts)
