"""Trains a byte-level BPE tokenizer on the train split of the embedded corpus.

    python -m experiments.corpus.build_tokenizer --destination bpe4k.json.xz

This command made the tokenizer `bpe4k` that memjax ships. A destination that ends in
`.xz` is compressed, which only that file needs: `load_tokenizer` reads plain JSON.
"""

import lzma
from collections.abc import Iterable
from pathlib import Path

import tokenizers
import tyro
from tokenizers import decoders, models, pre_tokenizers, trainers

from memjax.data import open_documents


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


def main(destination: Path) -> None:
    """Writes the tokenizer of the embedded corpus, compressed if the name says so."""
    documents = open_documents("embedded")
    texts = [document.text for document in documents if document.split == "train"]
    content = train_tokenizer(texts, 4096).encode("utf-8")
    if destination.suffix == ".xz":
        content = lzma.compress(content, preset=9)
    destination.write_bytes(content)


if __name__ == "__main__":
    tyro.cli(main)
