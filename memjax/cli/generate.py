"""The command `memjax generate`."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import memjax
from memjax.checks import check_seed, check_sizes
from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.cli.texts import opening, rows
from memjax.conversation.streaming import printer
from memjax.data.documents.pieces import decode_after
from memjax.data.documents.tokenizer import encode_prompt
from memjax.models import Sampling, generate, stop_strings
from memjax.models.language_model.config import Dtype
from memjax.status import Status


def generate_text(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    prompt: str = "",
    prompt_file: Path | None = None,
    prompts: Path | None = None,
    tokens: int = 200,
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(  # noqa: B008
        0.8, 0, 0.95
    ),
    seed: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    json: bool = False,
    logprobs: bool = False,
    dtype: Dtype | None = None,
) -> int:
    """Reads a prompt of any length into the memory, and continues it.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        prompt: text to continue, "-" for standard input; or `prompt_file` or `prompts`.
        prompt_file: a text file, of any length.
        prompts: a file of many: lines of .txt, or of .jsonl with a field "prompt".
        tokens: maximum number to sample.
        n: samples of each prompt.
        sampling: how tokens are drawn.
        seed: of the sampling.
        stop: texts that end the output, and are not printed.
        ignore_eos: continue after the model's end of text.
        json: print a line of JSON for each sample: prompt, text, tokens, finish_reason.
        logprobs: with --json, also the log-probability of each token.
        dtype: of the activations of a model without a run; None is float32.
    """
    if (bool(prompt), prompt_file is not None, prompts is not None).count(True) != 1:
        raise ValueError(
            "give one of --prompt, --prompt-file and --prompts, and not empty"
        )
    if not all(stop):
        raise ValueError(f"stop must hold texts that are not empty, got {stop}")
    check_sizes(tokens=tokens)
    check_seed(seed)
    rows.check_output(
        n=n, json=json, logprobs=logprobs, temperature=sampling.temperature
    )
    if prompts is not None:
        texts = rows.read_prompts(prompts)
    elif prompt_file is not None or prompt == rows.STDIN:
        texts = [rows.read_text(prompt_file or Path(prompt))]
    else:
        texts = [prompt]
    enable_compilation_cache()
    opened = opening.load(model, dtype, for_generation=True)
    ends = opened.text.generation.eos_ids
    settings: dict[str, Any] = {
        "max_new_tokens": tokens,
        "sampling": sampling,
        "stop_tokens": () if ignore_eos else ends,
    }
    key = jax.random.key(seed)
    if len(texts) == n == 1 and not json:
        # A prompt from a file is not printed.
        _stream(opened, texts[0], prompt and texts[0], stop, settings | {"key": key})
        return 0
    # Of a single prompt, which may be long, how much is read.
    single = len(texts) == 1
    with Status("generating", "tokens read" if single else "prompts") as status:
        for i, text in enumerate(texts):
            own = settings | {"key": jax.random.fold_in(key, i), "samples": n}
            own |= {"progress": status} if single else {}
            for j, row in enumerate(_rows(opened, text, stop, own)):
                if sys.stdout.isatty():
                    status.stop()
                if json:
                    row.show(logprobs)
                else:
                    print(rows.BETWEEN if i or j else "", end="")
                    print(f"{text if prompt or prompts else ''}{row.text}", flush=True)
            if not single:
                status(i + 1, len(texts))
    return 0


def _stream(opened, text, shown, stop, settings):
    """Prints the tokens of one answer as they are drawn."""
    tokenizer, parts = opened.tokenizer, []
    ends = opened.text.generation.eos_ids
    with Status("compiling, and reading the prompt", "tokens") as status:

        def write(part: str) -> None:
            status.stop()
            # With the first token: refused input prints nothing.
            print(part if parts else f"{shown}{part}", end="", flush=True)
            parts.append(part)

        limit = settings["max_new_tokens"]
        prompt = encode_prompt(tokenizer, text)
        decode = functools.partial(decode_after, tokenizer, prompt)
        shower = printer(decode, stop, limit, ends, write)
        _generate(opened, prompt, settings | {"progress": status}, shower)
    print()
    rows.require_said("".join(parts))


def _rows(opened, text, stop, settings) -> list[rows.Row]:
    """The answers to a prompt."""
    ends = set(opened.text.generation.eos_ids)
    prompt = encode_prompt(opened.tokenizer, text)
    decode = functools.partial(decode_after, opened.tokenizer, prompt)
    found = _generate(
        opened, prompt, settings, stop_strings(decode, stop) if stop else None
    )
    answers = []
    for ids, scores, length in zip(
        found.tokens, found.log_probs, found.lengths.tolist(), strict=True
    ):
        ids = ids[:length]
        ended = {*settings["stop_tokens"]} >= {int(ids[-1])}
        said = decode(np.array([t for t in ids if t not in ends], np.int32))
        places = [said.index(part) for part in stop if part in said]
        reason = "stop" if ended or places else "length"
        said = said[: min(places)] if places else said
        answers.append(
            rows.Row(text, said, ids.tolist(), reason, scores[:length].tolist())
        )
    return answers


def _generate(opened: memjax.Loaded, prompt, settings, stop_when: Callable | None):
    return generate(
        opened.model,
        None,
        prompt[None],
        stop_when=stop_when,
        vocab_size=opened.tokenizer.vocab_size,
        **settings,
    )
