"""The implementations of generation that are timed: memjax and transformers.

Both read the same GGUF file, compute in float32 and take the most likely token. Each
step draws once for the first token alone, and once for all.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import memjax
from memjax.models import Sampling, generate

Implementation = Literal["memjax", "transformers", "transformers_compiled"]


class Prompts(NamedTuple):
    """Prompts of unequal length.

    Attributes:
        tokens: [B, T]; behind a prompt's end they mean nothing.
        lengths: of each prompt.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]


def make(
    name: Implementation, file: Path, prompts: Prompts, new_tokens: int
) -> Callable[[], dict[str, Any]]:
    """A step of an implementation: draws `new_tokens` and says how long it took.

    Returns:
        A function whose result has `first_s`, seconds to the first token; `whole_s`,
        seconds to all of them; `tokens`, what each prompt went on with; and `digest`.
    """
    if name == "memjax":
        draw = _ours(file, prompts)
    else:
        slots = prompts.tokens.shape[1] + new_tokens
        draw = _transformers(file, prompts, slots if "compiled" in name else None)

    def step():
        seconds, tokens = {}, np.zeros(0)
        for part, count in (("first_s", 1), ("whole_s", new_tokens)):
            begin = time.perf_counter()
            tokens = draw(count)
            seconds[part] = time.perf_counter() - begin
        digest = hashlib.sha256(tokens.astype(np.int64).tobytes()).hexdigest()
        return seconds | {"tokens": tokens.tolist(), "digest": digest}

    return step


def _ours(file: Path, prompts: Prompts) -> Callable[[int], np.ndarray]:
    model = memjax.load(file).model
    equal = len(set(prompts.lengths)) == 1
    lengths = None if equal else prompts.lengths

    def draw(count):
        key = jax.random.key(0)
        return generate(
            *(model, None, prompts.tokens, count),
            key=key,
            sampling=Sampling(temperature=0),
            lengths=lengths,
        ).tokens

    return draw


def _transformers(
    file: Path, prompts: Prompts, slots: int | None
) -> Callable[[int], np.ndarray]:
    # Optional, and no other implementation's process should load it.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    options: dict[str, Any] = {}
    if slots is not None:
        # Its best known form: a cache of fixed size, and a compiled forward.
        cache = transformers.StaticCache(config=model.config, max_cache_len=slots)
        options = {"past_key_values": cache}
        model.forward = torch.compile(model.forward)
    # Padded at the left, as it expects.
    batch, longest = prompts.tokens.shape
    ids = np.zeros((batch, longest), np.int64)
    mask = np.zeros((batch, longest), np.int64)
    for b, length in enumerate(prompts.lengths):
        ids[b, longest - length :] = prompts.tokens[b, :length]
        mask[b, longest - length :] = 1
    inputs = {"input_ids": torch.from_numpy(ids)}
    inputs["attention_mask"] = torch.from_numpy(mask)

    def draw(count):
        with torch.inference_mode():
            if "past_key_values" in options:
                options["past_key_values"].reset()
            out = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                **options,
            )
        return out[:, longest:].numpy()

    return draw
