"""The torch baseline of HMT's training step: the program that its authors released.

The program is not part of this project. `git clone` it from
https://github.com/OswaldHe/HMT-pytorch and install what it imports (PyTorch,
transformers, accelerate, peft, evaluate, scikit-learn). Two things are changed so that
it runs on a machine without a GPU and without a network. Its calls that send tensors to
a GPU leave them where they are. The two metrics that it downloads, which a training
step does not use, are None.
"""

import pathlib
import sys
from typing import Any

from experiments.hmt.speed.operations import Shape, Trained

FILE = "modeling_rmt/language_modeling.py"
# The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def program(checkout: pathlib.Path) -> Any:
    """Its module, for a machine without a GPU and without a network."""
    import accelerate  # pyright: ignore[reportMissingImports]
    import evaluate  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    here: Any = torch.Tensor
    here.cuda = lambda tensor, *_: tensor
    evaluate.load = lambda *_: None
    # Its logger wants one.
    accelerate.Accelerator(cpu=True)
    sys.path.insert(0, str(checkout))
    from modeling_rmt import language_modeling  # pyright: ignore[reportMissingImports]

    return language_modeling


def build(checkout: pathlib.Path, backbone: Any, shape: Shape, trained: Trained) -> Any:
    """Its model over a Hugging Face backbone, with its defaults.

    Args:
        checkout: the program's folder.
        backbone: changed in place.
        shape: of the backbone and the memory.
        trained: with "lora" the linear maps of the layers, without dropout, as ours.
    """
    if trained == "lora":
        import peft  # pyright: ignore[reportMissingImports]

        lora = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            target_modules=list(ADAPTED),
            r=8,
            lora_alpha=32,
            lora_dropout=0.0,
        )
        backbone = peft.get_peft_model(backbone, lora)
    module = program(checkout)
    cell = module.MemoryCell(backbone, 1, shape.sensory)
    model = module.RecurrentWrapper(
        cell,
        emb=backbone.get_input_embeddings(),
        word_emb_dim=shape.width,
        hidden_dim=shape.retrieval_dim,
        ltm_context=300,
        segment_size=shape.segment,
        max_n_segments=shape.segments,
        mask_size=shape.segment,
        n_cell_out=5,
    )
    return model.train()


def adamw(model: Any) -> Any:
    """Its optimizer: weight decay on everything that is trained."""
    import torch  # pyright: ignore[reportMissingImports]

    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.01)


def training_step(model: Any, optimizer: Any, tokens: Any, segment: int) -> float:
    """One update on tokens [B, T], as its training loop makes it; returns the loss."""
    import torch  # pyright: ignore[reportMissingImports]

    optimizer.zero_grad()
    out, _ = model(
        input_ids=tokens,
        labels=tokens,
        attention_mask=torch.ones_like(tokens),
        segment_size=segment,
        sum_fraction=0.5,
    )
    out.loss.backward()
    optimizer.step()
    return out.loss.detach().item()
