"""The commands train, finetune, aot, eval, generate, tell, ask, chat and more.

Exit codes: 0 done; 2 bad input, with one line on stderr; 75 stopped by a signal with
everything saved (run the same command again to resume); 130 Ctrl-C with nothing to
save, 143 SIGTERM to a command that does not train; 1 anything else. `memjax.cli.entry`
handles signals.
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from memjax import evaluation
from memjax.buckets.bucket import as_path
from memjax.buckets.writing import write_atomically
from memjax.checks import printable
from memjax.cli import aot as cli_aot
from memjax.cli import checkpoints as cli_interop
from memjax.cli import cluster, config_files, help
from memjax.cli import conversation as cli_conversation
from memjax.cli import finetune as cli_finetune
from memjax.cli import generate as cli_generate
from memjax.cli import memory as cli_memory
from memjax.cli.arguments.parsing import Configured, parse
from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.cli.texts import opening
from memjax.cli.texts.sample import show_next, show_sample
from memjax.data import (
    RowConfig,
    Split,
    TokenisedDocument,
    Tokenizer,
    load_tokenizer,
    load_tokens,
)
from memjax.data.documents.prepare import PrepareConfig, prepare
from memjax.data.documents.sources import check_source, splits_of
from memjax.evaluation import plots, report
from memjax.evaluation.losses import cut_texts
from memjax.leaving import EXIT_INTERRUPTED
from memjax.models.language_model.config import Dtype
from memjax.status import Status, say, warnings_as_lines
from memjax.training import pretrain as run
from memjax.training.config import DataConfig, RunConfig
from memjax.training.monitoring.curves import draw_curves
from memjax.training.monitoring.header import beginning
from memjax.training.resume import NonFiniteError
from memjax.training.run_data import load_sources

#: Characters of an error message; ten names of 200 fit.
MAX_MESSAGE = 3000


def train(
    config: RunConfig,
    run_dir: Path = Path("runs/latest"),
    distributed: Literal["auto", "on", "off"] = "auto",
    compilation_cache: str | None = None,
) -> int:
    """Trains a model from a preset, or resumes a run.

    The vocabulary is that of --data.tokenizer unless given.

    Args:
        config: the preset; each of its fields is an option.
        run_dir: folder of the run, or its URL on gs:// or s3://; the same command with
            the same folder resumes it.
        distributed: join the other hosts: "on" for a TPU pod; "auto" if GKE, Slurm or
            Open MPI name several.
        compilation_cache: folder for compiled programs, or "off"; None is
            JAX_COMPILATION_CACHE_DIR, or else the user's cache folder.
    """
    enable_compilation_cache(compilation_cache)
    folder = as_path(run_dir)
    with cluster.joined(distributed):
        tokenizer = load_tokenizer(config.data.tokenizer)
        outcome = run.train(run.with_vocabulary(config, tokenizer), folder)
        finished, alone = outcome.reason == "finished", jax.process_count() == 1
    print(f"{outcome.reason} at step {outcome.step}; run folder {folder}")
    # A stopped run has no time for it.
    if outcome.reason != "preempted" and (curves := draw_curves(folder)):
        print(f"wrote {curves}")
    if finished and alone and config.loop.sample_tokens:
        show_sample(config, folder)
    if finished:
        show_next(folder)
    return outcome.exit_code


def evaluate(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    split: Literal["train", "validation", "test"] = "test",
    source: str | None = None,
    column: str | None = None,
    join: str | None = None,
    context_length: int = 0,
    tokens_per_call: int = 0,
    batch_size: int = 8,
    sampling: Literal["uniform", "exponential"] | None = None,
    decay: float = 0.98,
    dtype: Dtype | None = None,
    reference: str | None = None,
    output: Path | None = None,
) -> int:
    """Evaluates the perplexity of a model, by kind of text and by position.

    Writes `eval-<split>.json` and a plot of loss by position. With HMT, targets that a
    summary has read before are left out; "all_targets" is the perplexity of all, as the
    official program scores. Null is what no text is long enough for.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        split: of the documents.
        source: of the documents, as in `memjax data`; None is that of the run, or
            "embedded" without one.
        column: of the texts in `source`, as --data.column of `memjax train`.
        join: joins rows of `source` to documents, as --data.join of `memjax train`.
        context_length: cut documents into texts of this length, each read with an empty
            memory; 0 reads every document as one stream.
        tokens_per_call: 0 is the training context, or the window of a model without a
            run.
        batch_size: texts per batch.
        sampling: sampling points of Elastic Memory; None as in training.
        decay: of the exponential sampling.
        dtype: of the activations of a model without a run; None is float32.
        reference: a model that reads texts of this length, as MODEL; also LongPPL, the
            perplexity of the tokens that it predicts by the long context alone.
        output: folder of the results; None is that of the run, or `eval`.
    """
    enable_compilation_cache()
    opened = opening.load(model, dtype)
    found, data = opened.model, opened.run.data if opened.run else None
    if sampling is not None:
        found = run.with_sampling(found, sampling=sampling, decay=decay)
    own = data or DataConfig()
    if source:
        own = DataConfig(source, cache_dir=own.cache_dir)
    own = dataclasses.replace(own, column=column or own.column, join=join or own.join)
    with Status("reading documents"):
        sources = load_sources(own, opened.tokenizer, split)
    documents = [document for part in sources for document in part]
    say(f"a text begins with {beginning(opened.tokenizer)}")
    texts, keys = cut_texts(documents, context_length), None
    if reference is not None:
        keys = _key_tokens(reference, texts, opened.tokenizer, own.cache_dir)
    with Status("scoring", "tokens") as progress:
        every = evaluation.token_losses(
            found,
            documents,
            context_length=context_length,
            tokens_per_call=tokens_per_call
            or (data.context_length if data else found.window),
            batch_size=batch_size,
            progress=progress,
        )
    losses, window = evaluation.drop_leaked_targets(found, every), found.window
    key = keys and evaluation.keep_key_tokens(
        losses, keys, texts, tokenizer=opened.tokenizer
    )
    rows = report.perplexities(losses, every, window, key)
    edges = evaluation.log2_bins(losses.nll.shape[1])
    curve = evaluation.loss_by_position(losses, edges)
    titles = {"beyond_window": f"beyond {window} tokens", "all_targets": "all targets"}
    titles["long_ppl"] = "LongPPL"
    names = report.columns(rows)
    table = Table("text", *(titles.get(name, name) for name in names))
    for kind, row in rows.items():
        shown = (row[name] for name in names)
        table.add_row(kind, *("" if x is None else f"{x:.3f}" for x in shown))
    Console().print(table)
    result: dict[str, Any] = {"split": split, "perplexity": rows, "edges": edges}
    result["nats"] = [report.or_none(value) for value in curve]
    folder = as_path(output or (model if opened.run else "eval"))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / f"eval-{split}.json", json.dumps(result, indent=1, allow_nan=False)
    )
    plot = folder / f"eval-{split}.png"
    plots.loss_by_position({split: curve}, edges, plot, window=window)
    print(f"wrote {folder / f'eval-{split}.json'} and {plot}")
    return 0


def _key_tokens(
    reference: str,
    texts: list[TokenisedDocument],
    tokenizer: Tokenizer,
    cache_dir: Path | None,
) -> evaluation.KeyTokens:
    """Key tokens of texts by a model that is not needed afterwards."""
    by = opening.load(reference)
    given = by.model, by.tokenizer, texts, tokenizer
    with Status("finding key tokens", "tokens") as progress:
        options: Any = {"cache_dir": cache_dir, "progress": progress}
        keys = evaluation.key_tokens_by(*given, **options)
    say(f"{keys.total:,} key tokens by {reference}")
    return keys


def data(
    what: Annotated[Literal["list", "prepare"], tyro.conf.Positional] = "list",
    source: str = "embedded",
    column: str | None = None,
    join: str | None = None,
    tokenizer: str = "bpe4k",
    destination: Path | None = None,
    workers: int | None = None,
) -> int:
    """Lists a source's documents, or prepares their tokens for training.

    `memjax data prepare` writes tokens to ArrayRecord files, which
    `--data.source prepared:FOLDER` reads in place. The same command with the same
    folder resumes an interrupted preparation.

    Args:
        what: list documents, or prepare their tokens.
        source: "embedded", the path of a file or folder, "tfds:NAME", "hf:NAME:CONFIG",
            "hf:NAME:CONFIG:SPLIT" with "train[:1%]" as a split, or "prepared:FOLDER".
        column: key or column with the text; None takes "text" or the like.
        join: rows that become one document: a number, "blank" (up to an empty row) or
            "articles" (from one title to the next, `= Title =`); None: each is one.
        tokenizer: "bytes", "bpe4k", or a file or model of the hub.
        destination: folder to prepare.
        workers: processes that tokenise; None is one per core.
    """
    rows = RowConfig(column, join)
    if what == "prepare":
        return _prepare(source, rows, tokenizer, destination, workers)
    for name, value in {"destination": destination, "workers": workers}.items():
        if value is not None:
            raise ValueError(
                f"--{name} is an option of memjax data prepare, got {value} without it"
            )
    table = Table("document", "kind", "split", "tokens")
    splits: tuple[Split, ...] = ("train", "validation", "test")
    for note in check_source(source, rows):
        print(f"{source}: {note}")
    found = splits_of(source, rows)
    counted = load_tokenizer(tokenizer)
    for split in splits:
        if split not in found:
            continue
        with Status(f"reading {split} documents"):
            documents = load_tokens(source, counted, split, rows=rows)
        for document in documents:
            size = f"{len(document.tokens):,}"
            table.add_row(document.name, document.kind, split, size)
    Console().print(table)
    return 0


def _prepare(
    source: str,
    rows: RowConfig,
    tokenizer: str,
    destination: Path | None,
    workers: int | None,
) -> int:
    if destination is None:
        raise ValueError("memjax data prepare needs --destination, the folder to write")
    cores = len(os.sched_getaffinity(0)) if workers is None else workers
    config = PrepareConfig(source, tokenizer, workers=cores, rows=rows)
    with Status("tokenising", "characters") as progress:
        manifest = prepare(config, as_path(destination), progress)
    for split, shards in manifest["shards"].items():

        def count(key, shards=shards):
            return sum(shard[key] for shard in shards)

        print(
            f"{split:11} {count('documents'):,} documents, {count('tokens'):,} tokens, "
            f"{len(shards)} files"
        )
    print(f"read it with --data.source prepared:{as_path(destination)}")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "eval": evaluate,
    "generate": cli_generate.generate_text,
    "tell": cli_conversation.tell,
    "ask": cli_conversation.ask,
    "chat": cli_conversation.chat,
    "memory": cli_memory.memory,
    "data": data,
    "import": cli_interop.import_model,
    "export": cli_interop.export_model,
}
#: Commands that take a configuration.
CONFIGURED = {
    "train": Configured(train, run.presets, config_files.read_training),
    "finetune": Configured(
        cli_finetune.finetune, cli_finetune.presets, config_files.read_finetuning
    ),
    "aot": Configured(cli_aot.aot, cli_aot.presets, cli_aot.read),
}


def main(argv: list[str] | None = None) -> None:
    """Runs a command; bad input is one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if page := help.quick_answer(argv):
        print(page)
        sys.exit(0)
    try:
        with warnings_as_lines():
            code = parse(argv, COMMANDS, CONFIGURED)()
    except BrokenPipeError:
        # `entry` ends the program silently: the reader has ended.
        raise
    # An ImportError names a missing optional package.
    except (ValueError, OSError, ImportError, NonFiniteError) as error:
        print(f"memjax: {_one_line(str(error))}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("memjax: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(
            error
        ):
            raise
        print(f"memjax: out of memory: {_one_line(str(error))}", file=sys.stderr)
        code = 1
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = 1
    cluster.leave(code)
    sys.exit(code)


def _one_line(message: str) -> str:
    """The message without line breaks, shortened."""
    words = printable(" ".join(message.split()))
    return words if len(words) <= MAX_MESSAGE else f"{words[:MAX_MESSAGE]}..."
