"""Training of byte-level BPE tokenizers, such as `bpe4k`, which memjax ships.

`bpe4k` has 4096 ids and was trained on the train split of the embedded corpus.
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the JSON of a byte-level BPE without special tokens.

    Digits are split one by one, as SmolLM2 does; every text decodes to itself. Texts
    with too few distinct pairs give fewer than vocab_size ids.
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
