"""Makes `sentencepiece.json`: a small SentencePiece BPE and its tokens of some texts.

    python tests/models/golden/make_sentencepiece_golden.py

Needs sentencepiece; made with 0.2.3. The model is trained as Llama 2's was: byte
fallback, digits alone, white space kept, a space put before every text.
"""

import io
import json
import random
from pathlib import Path

import sentencepiece  # pyright: ignore[reportMissingImports]

from memjax.data import open_documents

TEXTS = [
    "",
    " ",
    "It was in the year 1995, I'LL say: don't stop.",
    "  two spaces,   three\n\n\n1 And\t\r\n  22  x = 3.14;",
    "caf\u00e9 cafe\u0301 \u65e5\u672c\u8a9e \u00bd  ??!! \U0001f600",
    "def f(x):\n        return x_1 + x_2  # \u2581",
]


def random_texts(count):
    """Repeats, where the order in which neighbours are joined matters."""
    rng = random.Random(0)
    for _ in range(count):
        letters = rng.sample([" ", "-", "a", "\n", "e", "o", "the", "\u00e9"], 2)
        yield "".join(rng.choice(letters) for _ in range(rng.randrange(1, 24)))


def kind(model, index):
    """The type that GGUF gives a token."""
    if model.is_unknown(index):
        return 2
    if model.is_control(index):
        return 3
    return 6 if model.is_byte(index) else 1


def main():
    documents = [d.text[:40_000] for d in open_documents("embedded")]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(documents).splitlines()),
        model_writer=trained,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        character_coverage=0.99,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    indices = range(model.get_piece_size())
    texts = [*TEXTS, documents[4][1000:1600], *random_texts(60)]
    record = {
        "tokens": [model.id_to_piece(i) for i in indices],
        "scores": [model.get_score(i) for i in indices],
        "token_type": [kind(model, i) for i in indices],
        "ids": {text: model.encode(text) for text in texts},
    }
    file = Path(__file__).parent / "sentencepiece.json"
    file.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
