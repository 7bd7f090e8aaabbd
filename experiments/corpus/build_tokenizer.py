"""Trains a byte-level BPE tokenizer on the train split of a source.

    python -m experiments.corpus.build_tokenizer \\
        --source embedded --destination bpe4k.json.xz

This command made the tokenizer `bpe4k` that memjax ships. A destination that ends in
`.xz` is compressed, which only that file needs: `load_tokenizer` reads plain JSON.
"""

import dataclasses
import lzma
import os
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers, trainers

from memjax.data.documents import sources
from memjax.data.documents.tokenizer import parse_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """Source, size and destination.

    Attributes:
        destination: file to write, of `tokenizers` JSON; compressed if it ends in .xz.
        source: any source that `open_documents` knows; only its train split is read.
        vocab_size: number of ids, at least 256 (one for each byte).
    """

    destination: Path
    source: str = "embedded"
    vocab_size: int = 4096


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the JSON of a byte-level BPE without special tokens.

    Digits are split one by one, as SmolLM2 does; every text decodes to itself. Texts
    with too few distinct pairs give fewer than vocab_size ids.

    Raises:
        ValueError: vocab_size is below 256.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size} must be at least 256")
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    # The stubs declare these three as read-only attributes.
    setattr(backend, "pre_tokenizer", split)  # noqa: B010
    setattr(backend, "decoder", decoders.ByteLevel())  # noqa: B010
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def main(config: Config) -> None:
    """Trains the tokenizer and writes it."""
    documents = sources.open_documents(config.source)
    texts = [document.text for document in documents if document.split == "train"]
    serialised = train_tokenizer(texts, config.vocab_size).encode("utf-8")
    size = parse_tokenizer(serialised, str(config.destination)).vocab_size
    if config.destination.suffix == ".xz":
        serialised = lzma.compress(serialised, preset=9)
    partial = config.destination.with_name(config.destination.name + ".tmp")
    partial.write_bytes(serialised)
    os.replace(partial, config.destination)
    print(f"{config.destination}: {len(texts)} documents, {size} ids")


if __name__ == "__main__":
    main(tyro.cli(Config))
