"""M+ in eager PyTorch: what the speed of ours is measured against.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, written from the description and
computed as the authors' released program computes it: one text at a time, every layer
on its own; dropped rows go to the host and are appended to a cache there, which is
copied whole at each update, as the store is at each merge; every key travels to the
device for every search; logits are made for every token, injected ones as well.
Attention is PyTorch's fused one. It reproduces that program's numbers
(`tests/experiments/mplus/test_pytorch.py`). Needs PyTorch; the backbone is
transformers' LlamaForCausalLM.

Shapes: T time, D width, V vocabulary, L layers, K tokens of a chunk's memory, N rows of
the pool, M rows held by the store, R retrieved rows, S positions of a layer, H heads.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

# The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
# Recall frequencies are lowered by repeated subtraction; this is none.
NONE_LEFT = 0.01
Cache = list[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class PeerConfig:
    """Sizes of the memory.

    Attributes:
        tokens: K, rows that a chunk leaves.
        pool: N, rows of the short-term pool.
        retrieved: R, rows of the store that a text reads.
        store: rows of the store to begin with, random.
        key_dim: width of queries and keys.
        rank, alpha: of both LoRA adapters.
        merge_every: updates between two merges of the dropped rows into the store.
        recalls, decay: recall frequency of a row when it is merged, and what each
            merge takes of it.
        creation_ages: ages count from a row's creation, as in the authors' training
            code; False is the released file, where they count from the drop.
    """

    tokens: int = 256
    pool: int = 10_240
    retrieved: int = 2_560
    store: int = 5_120
    key_dim: int = 256
    rank: int = 16
    alpha: float = 32.0
    merge_every: int = 60
    recalls: float = 10.0
    decay: float = 1.0
    creation_ages: bool = False


class Adapted(nn.Module):
    """A linear map plus scale · B A of the adapter in use, Hu et al. (2021)."""

    def __init__(self, base: Any, rank: int, alpha: float):
        super().__init__()
        names = ("write", "read")
        self.base, self.scale, self.active = base, alpha / rank, "write"
        maps = {name: nn.Linear(base.in_features, rank, bias=False) for name in names}
        self.down = nn.ModuleDict(maps)
        maps = {name: nn.Linear(rank, base.out_features, bias=False) for name in names}
        self.up = nn.ModuleDict(maps)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in] to [..., out]."""
        down, up = self.down[self.active], self.up[self.active]
        return self.base(x) + self.scale * up(down(x))


class Store:
    """One layer's long-term rows and, not yet merged, the rows dropped since.

    Tensors live on the host; ages and recall frequencies are NumPy's.
    """

    def __init__(self, rows: Tensor, keys: Tensor, ages: np.ndarray):
        self.rows, self.keys, self.ages = rows, keys, ages
        self.recalls = np.zeros(len(rows))
        self.dropped: tuple[Tensor, Tensor, np.ndarray] | None = None

    def add(self, rows: Tensor, keys: Tensor, ages: np.ndarray, older: int) -> None:
        """Everything held ages by `older`; then rows [K, D] join the dropped ones."""
        self.ages = self.ages + older
        rows, keys = rows.cpu(), keys.cpu()
        if self.dropped is None:
            self.dropped = rows, keys, ages
            return
        old_rows, old_keys, old_ages = self.dropped
        self.dropped = (
            torch.cat([old_rows, rows]),
            torch.cat([old_keys, keys]),
            np.concatenate([old_ages + older, ages]),
        )

    def merge(self, config: PeerConfig) -> None:
        """The dropped rows join the store, and rows recalled too seldom leave it."""
        if self.dropped is None:
            return
        rows, keys, ages = self.dropped
        self.rows = torch.cat([self.rows, rows])
        self.keys = torch.cat([self.keys, keys])
        self.ages = np.concatenate([self.ages, ages])
        self.recalls = np.append(self.recalls, np.full(len(rows), config.recalls))
        self.dropped = None
        left = self.recalls - config.decay
        alive = np.flatnonzero(left > NONE_LEFT)
        if len(alive) > config.retrieved:
            self.rows, self.keys = self.rows[alive], self.keys[alive]
            self.ages, self.recalls = self.ages[alive], left[alive]

    def search(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best rows for queries [T, d], oldest first, and their indices.

        Indices run over the store, then the dropped rows. A store of fewer than
        `count` rows is repeated instead.
        """
        held = len(self.rows)
        if held < count:
            chosen = torch.arange(-count, 0) % held
        else:
            scores = self._scores(queries, self.keys)
            if self.dropped is not None:
                more = self._scores(queries, self.dropped[1])
                scores = torch.cat([scores, more])
            chosen = torch.topk(scores, count).indices.sort().values.cpu()
        if self.dropped is None:
            chosen = chosen[_oldest_first(self.ages[chosen.numpy()])]
            return self.rows[chosen], chosen
        rows, _, ages = self.dropped
        old, new = chosen[chosen < held], chosen[chosen >= held] - held
        order = _oldest_first(
            np.concatenate([self.ages[old.numpy()], ages[new.numpy()]])
        )
        return torch.cat([self.rows[old], rows[new]])[order], chosen[order]

    @staticmethod
    def _scores(queries: Tensor, keys: Tensor) -> Tensor:
        return (queries @ keys.to(queries.device).T).sigmoid().mean(0)


class PeerMPlus(nn.Module):
    """A LlamaForCausalLM with a short-term pool and a long-term store, for one text."""

    def __init__(self, backbone: Any, config: PeerConfig):
        super().__init__()
        self.config, self.backbone = config, backbone
        layers, width = len(backbone.model.layers), backbone.config.hidden_size
        for block in backbone.model.layers:
            for part in (block.self_attn, block.mlp):
                for name in set(ADAPTED) & {name for name, _ in part.named_children()}:
                    base = getattr(part, name)
                    setattr(part, name, Adapted(base, config.rank, config.alpha))
        self.bos = nn.Parameter(torch.randn(layers, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 1, width))
        self.query, self.key, self.encoder_query = (
            nn.ModuleList(_projector(width, config.key_dim) for _ in range(layers))
            for _ in range(3)
        )
        self.register_buffer("pool", torch.randn(layers, config.pool, width))
        held = config.store
        stores = [
            Store(torch.randn(held, width), torch.randn(held, config.key_dim), ages)
            for ages in np.zeros((layers, held), int)
        ]
        self.start(np.zeros((layers, config.pool), int), stores)

    def start(self, ages: np.ndarray, stores: list[Store]) -> None:
        """Sets the ages [L, N] of the pool's rows, and the stores of the layers."""
        self.ages, self.stores, self.updates = list(ages), stores, 0

    @torch.no_grad()
    def inject(self, ids: Tensor, dropped: np.ndarray | None = None) -> Tensor:
        """Compresses a chunk ids [1, T] and updates the memory.

        `dropped` [L, K] are the pool's rows that leave, ascending; random without it.
        Returns the chunk's memory [L, K, D].
        """
        delta = self.compress(ids)
        for layer, new in enumerate(delta):
            self._update(layer, new, None if dropped is None else dropped[layer])
        self.updates += 1
        if self.updates % self.config.merge_every == 0:
            for store in self.stores:
                store.merge(self.config)
        return delta

    def compress(self, ids: Tensor) -> Tensor:
        """The memory [L, K, D] of a chunk ids [1, T]; nothing is updated."""
        kept, length = self.config.tokens, ids.shape[1]
        self._use("write")
        h, made = self.backbone.model.embed_tokens(ids), []
        rotation = self._rotation(0, 1 + kept + length)
        for layer in range(len(self.pool)):
            x = torch.cat([self.bos[layer][None], self.pool[layer, None, -kept:], h], 1)
            x[:, -kept:] += self.position
            y, _ = self._layer(layer, x, 1 + min(kept, length), rotation)
            made.append(y[0, -kept:])
            h = y[:, -length:]
        self._logits(h)
        return torch.stack(made)

    @torch.no_grad()
    def read(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits [1, T, V] of ids [1, T] behind the memory, and the cache to go on.

        Without a cache every layer retrieves, asking with all T tokens; with one it
        reads on where that ended.
        """
        self._use("read")
        prefix = 0 if cache else 1 + self.config.retrieved + self.config.pool
        before = cache[0][0].shape[2] if cache else 0
        h, kept = self.backbone.model.embed_tokens(ids), []
        rotation = self._rotation(before, prefix + ids.shape[1])
        for layer in range(len(self.pool)):
            if not cache:
                found = self.retrieve(layer, h)[None].to(h.device)
                pool = self.pool[layer][None]
                h = torch.cat([self.bos[layer][None], found, pool, h], dim=1)
            past = cache[layer] if cache else None
            h, pair = self._layer(layer, h, prefix, rotation, past)
            kept.append(pair)
        return self._logits(h), kept

    def retrieve(self, layer: int, h: Tensor) -> Tensor:
        """The rows [R, D] that the layer's inputs h [1, T, D] ask for, on the host."""
        norm = self.backbone.model.layers[layer].input_layernorm
        queries = self.query[layer](norm(h[0]))
        return self.stores[layer].search(queries, self.config.retrieved)[0]

    def _update(self, layer: int, delta: Tensor, dropped: np.ndarray | None) -> None:
        """The pool's `dropped` rows leave for the host; delta [K, D] comes."""
        rows, new = self.config.pool, self.config.tokens
        if dropped is None:
            dropped = np.sort(torch.randperm(rows)[rows - new :].numpy())
        keep = np.delete(np.arange(rows), dropped)
        pool, ages = self.pool[layer], self.ages[layer]
        if self.config.creation_ages:
            ages = ages + new
        norm = self.backbone.model.layers[layer].input_layernorm
        gone = pool[torch.from_numpy(dropped).long()]
        keys = self.key[layer](norm(gone))
        self.stores[layer].add(gone, keys, ages[dropped], new)
        self.pool[layer] = torch.cat([pool[torch.from_numpy(keep)], delta])
        self.ages[layer] = np.concatenate([ages[keep], np.arange(new)[::-1]])

    def _layer(
        self, layer: int, x: Tensor, prefix: int, rotation: Any, past: Any = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A decoder layer on x [1, S, D] whose first `prefix` rows are only read.

        Returns the other rows [1, S - prefix, D], and keys and values so far.
        """
        block = self.backbone.model.layers[layer]
        attention, n = block.self_attn, block.input_layernorm(x)
        heads = lambda y: y.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        q, k, v = (
            heads(map_(y))
            for map_, y in (
                (attention.q_proj, n[:, prefix:]),
                (attention.k_proj, n),
                (attention.v_proj, n),
            )
        )
        cos, sin = rotation
        q = _rotate(q, cos[:, prefix:], sin[:, prefix:])
        k = _rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        shape = (q.shape[2], k.shape[2])
        seen = torch.ones(shape, dtype=torch.bool, device=x.device)
        seen = seen.tril(shape[1] - shape[0])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        y = x[:, prefix:] + attention.o_proj(y.transpose(1, 2).flatten(2))
        return y + block.mlp(block.post_attention_layernorm(y)), (k, v)

    def _rotation(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, count, head width] of positions from `start`."""
        positions = torch.arange(start, start + count, device=self.pool.device)
        return self.backbone.model.rotary_emb(self.pool, positions[None])

    def _logits(self, h: Tensor) -> Tensor:
        return self.backbone.lm_head(self.backbone.model.norm(h)).float()

    def _use(self, adapter: Literal["write", "read"]) -> None:
        for module in self.modules():
            if isinstance(module, Adapted):
                module.active = adapter


def _oldest_first(ages: np.ndarray) -> np.ndarray:
    return np.argsort(ages)[::-1].copy()


def _projector(width: int, key_dim: int) -> nn.Sequential:
    """The retriever's map: width D to key_dim, by way of twice that."""
    first = nn.Linear(width, 2 * key_dim, bias=False)
    return nn.Sequential(first, nn.SiLU(), nn.Linear(2 * key_dim, key_dim, bias=False))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [1, H, T, width], by cosines and sines [1, T, width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def official_names(model: PeerMPlus) -> Iterator[tuple[str, Any]]:
    """Parameters under the names of the authors' checkpoints."""
    names = {"bos": "bos_embedding", "position": "new_memory_positional_emb"}
    inside = {
        ".base.": ".base_layer.",
        ".down.write.": ".lora_A.default.",
        ".down.read.": ".lora_A.decoder_adapter.",
        ".up.write.": ".lora_B.default.",
        ".up.read.": ".lora_B.decoder_adapter.",
    }
    for path, parameter in model.named_parameters():
        name = str(path).removeprefix("backbone.")
        for ours, theirs in inside.items():
            name = name.replace(ours, theirs)
        first, _, rest = name.partition(".")
        if first in ("query", "key", "encoder_query"):
            layer, _, rest = rest.partition(".")
            name = f"model.layers.{layer}.self_attn.{first}_proj.{rest}"
        yield names.get(name, name), parameter


def load_official(model: PeerMPlus, tensors: Mapping[str, Any]) -> None:
    """Copies NumPy arrays, named as in the authors' checkpoints, into the model.

    Ages are not in a checkpoint: the pool's are 0 after it, as in the program.
    """
    with torch.no_grad():
        for name, parameter in official_names(model):
            parameter.copy_(torch.from_numpy(tensors[name]))
        model.pool.copy_(torch.from_numpy(tensors["memory"]))
    stores = []
    for layer in range(len(model.pool)):
        rows, keys = tensors[f"ltm.{layer}"], tensors[f"ltm_keys.{layer}"]
        ages = tensors[f"ltm_ages.{layer}"].astype(int)
        store = Store(torch.from_numpy(rows), torch.from_numpy(keys), ages)
        store.recalls = tensors[f"ltm_recall_frequencies.{layer}"].astype(float)
        stores.append(store)
    model.start(np.zeros(model.pool.shape[:2], int), stores)
