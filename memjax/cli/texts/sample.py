"""A sample of a trained model, and the command to generate more."""

import shlex

import jax

import memjax
from memjax.config_io import AnyPath
from memjax.models import Sampling, generate
from memjax.status import Status
from memjax.training.config import RunConfig
from memjax.training.run_data import load_split

#: Tokens of the prompt of a sample.
PROMPT = 16


def show_sample(config: RunConfig, folder: AnyPath) -> None:
    """Prints the beginning of a held-out text, and how the model goes on."""
    with Status("writing a sample"):
        loaded = memjax.load(folder)
        document = load_split(config, loaded.tokenizer, "validation")[0]
        prompt = document.tokens[:PROMPT]
        found = generate(
            loaded.model,
            None,
            prompt[None],
            config.loop.sample_tokens,
            key=jax.random.key(config.seed),
            sampling=Sampling(0.8, top_p=0.95),
        )
    decode = loaded.tokenizer.decode
    begin, text = (" ".join(decode(x).split()) for x in (prompt, found.tokens[0]))
    print(f"sample: [{document.name}: {begin}] {text}")


def show_next(folder: AnyPath) -> None:
    """Prints the command that generates with a finished run."""
    print(f'next: memjax generate {shlex.quote(str(folder))} --prompt "It was a"')
