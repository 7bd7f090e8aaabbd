"""HMT in eager PyTorch: what the speed of ours is measured against.

He et al. (2024), https://arxiv.org/abs/2405.06067, written from the equations and
computed as the authors' program computes it: the backbone is a Hugging Face model that
is called whole for every summary and every segment, so each call also makes logits for
each of its positions. It reproduces that program's losses, logits and gradients
(`tests/experiments/hmt/test_pytorch.py`). Needs PyTorch and transformers.

Shapes: B batch, T time, L segment, E width, V vocabulary, n memories held, X positions
of one backbone call.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

# The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class PeerConfig:
    """Sizes of the memory.

    Attributes:
        segment: L, new tokens of a segment.
        sensory: tokens of the segment before that are read again.
        memories: N, how many are searched.
        retrieval_dim: width of queries and keys.
        summary: tokens that the summary reads.
        retrieval: whether memories are searched; False is stage 1 and RMT.
    """

    segment: int
    sensory: int
    memories: int
    retrieval_dim: int
    summary: int
    retrieval: bool = True


class Segment(NamedTuple):
    """What one segment leaves behind: logits [B, L, V] and its memory [B, 1, E]."""

    logits: Tensor
    memory: Tensor


class PeerHMT(nn.Module):
    """A causal language model of Hugging Face with hierarchical memory."""

    def __init__(self, backbone: Any, config: PeerConfig):
        super().__init__()
        embedding = backbone.get_input_embeddings().weight
        width, spread = embedding.shape[1], embedding.detach().std()
        self.config = config
        self.backbone = backbone
        self.initial_memory = nn.Parameter(torch.randn(1, width) * spread)
        if config.retrieval:
            self.summary_prompt = nn.Parameter(torch.randn(1, width) * spread)
            self.query = nn.Linear(width, config.retrieval_dim, bias=False)
            self.key = nn.Linear(width, config.retrieval_dim, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> list[Segment]:
        """Reads tokens [B, T], of which `mask` [B, T] is 1 on those that are real."""
        size, sensory = self.config.segment, self.config.sensory
        done: list[Segment] = []
        for start in range(0, tokens.shape[1], size):
            ids, real = tokens[:, start : start + size], mask[:, start : start + size]
            before = tokens[:, max(0, start - sensory) : start]
            done.append(self._segment(ids, real, before, done))
        return done

    def _segment(self, ids, real, before, done):
        """One segment behind the memory prompt and the sensory tokens."""
        embed = self.backbone.get_input_embeddings()
        prompt = self._prompt(ids, real, [segment.memory for segment in done])
        x = torch.cat([prompt, embed(before), embed(ids), prompt], dim=1)
        # Sensory tokens are seen even where they are padding.
        seen = nn.functional.pad(real, (1 + before.shape[1], 1), value=1)
        logits, hidden = self._call(x, seen)
        return Segment(logits[:, 1 + before.shape[1] : -1], hidden[:, -1:])

    def _prompt(self, ids, real, memories):
        """The memory that a segment starts from, [B, 1, E]."""
        config = self.config
        summary = self._summary(ids, real) if config.retrieval else None
        if not memories:
            return self.initial_memory.expand(ids.shape[0], -1, -1)
        if summary is None:
            return memories[-1]
        bank = torch.cat(memories[-config.memories :], dim=1)
        scores = self.query(summary) @ self.key(bank).transpose(1, 2)
        return torch.softmax(scores / config.retrieval_dim**0.5, dim=-1) @ bank

    def _summary(self, ids, real):
        """What the backbone makes of the segment's beginning, [B, 1, E].

        Also of the first segment's, as the program does, where it finds nothing.
        """
        ids, real = ids[:, : self.config.summary], real[:, : self.config.summary]
        prompt = self.summary_prompt.expand(ids.shape[0], -1, -1)
        x = torch.cat([prompt, self.backbone.get_input_embeddings()(ids), prompt], 1)
        return self._call(x, nn.functional.pad(real, (1, 1), value=1))[1][:, -1:]

    def _call(self, x, seen):
        """Logits [B, X, V] and the states after the last norm [B, X, E]."""
        out = self.backbone(
            inputs_embeds=x,
            attention_mask=seen,
            output_hidden_states=True,
            use_cache=False,
        )
        return out.logits, out.hidden_states[-1]


def last_loss(segments: list[Segment], labels: Tensor, scored: int) -> Tensor:
    """Mean cross-entropy of the last `scored` tokens of labels [B, T], in nats."""
    logits = torch.cat([segment.logits for segment in segments], dim=1)
    logits = logits[:, -scored - 1 : -1]
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels[:, -scored:].reshape(-1)
    )


def training_step(model: PeerHMT, optimizer: Any, tokens: Tensor, scored: int) -> float:
    """One update on tokens [B, T]; returns the loss."""
    loss = last_loss(model(tokens, torch.ones_like(tokens)), tokens, scored)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adamw(model: PeerHMT) -> Any:
    """The program's optimizer: decay on everything that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.01)


class Adapted(nn.Module):
    """A frozen linear map plus scale · B A, Hu et al. (2021), without dropout."""

    def __init__(self, base: Any, rank: int, alpha: float):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in] to [..., out]."""
        return self.base(x) + self.scale * self.up(self.down(x))


def add_lora(model: PeerHMT, rank: int = 8, alpha: float = 32) -> None:
    """Freezes the backbone and adapts the linear maps of its layers."""
    model.backbone.requires_grad_(False)
    for parent in list(model.backbone.modules()):
        for name, child in list(parent.named_children()):
            if name in ADAPTED:
                setattr(parent, name, Adapted(child, rank, alpha))


def official_names(model: PeerHMT) -> Iterator[tuple[str, Any]]:
    """Parameters under the names of the authors' checkpoints."""
    names = {
        "initial_memory": "memory_cell.memory",
        "summary_prompt": "mem",
        "query.weight": "cross_attn.wq.weight",
        "key.weight": "cross_attn.wk.weight",
    }
    for path, parameter in model.named_parameters():
        name = str(path)
        inside = name.replace("backbone.", "memory_cell.model.", 1)
        yield names.get(name, inside), parameter


def load_official(model: PeerHMT, tensors: Mapping[str, Any]) -> None:
    """Copies NumPy arrays, named as in the authors' checkpoints, into the model."""
    with torch.no_grad():
        for name, parameter in official_names(model):
            parameter.copy_(torch.from_numpy(tensors[name]))
