"""Runs the authors' M+ program on the tiny checkpoint and writes `more.npz`.

    python make_mplus_goldens.py --program PATH

PATH is a checkout of the public program of the paper (wangyu-ustc/MemoryLLM, branch
main): none of it is kept here, so this file alone makes no numbers. It needs PyTorch
(2.15 was used) and the program's own transformers 4.48.2 and peft 0.10.0. Three things
are put in place of what the program asks for, and none changes the mathematics:

- attention on a CPU: exact, causal, aligned to the bottom right, as FlashAttention 2;
- `torch.randperm`: drawn from a seed here, and written down;
- where a key says `by_index`, `numpy.argsort`: equal ages then stand in the order of
  their index, which the program leaves to an unstable sort.

Before anything is written, scenario C of `golden.npz` is replayed: its ages count from
the creation of a row, as in the authors' training code; the released file lost a line.
What the keys mean is in README.md beside this file.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file

HERE = Path(__file__).parent


def attention(queries, keys, values, mask, length, **settings):
    """Exact attention of [B, T, H, K] on [B, S, G, K], the last T of S positions."""
    assert mask is None and settings["dropout"] == 0 and settings["is_causal"]
    groups = queries.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(groups, 2) for x in (keys, values))
    scores = torch.einsum("bthk,bshk->bhts", queries, keys) / queries.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril(keys.shape[1] - length)
    scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", scores, values)


class ByIndex:
    """NumPy, whose argsort lists equal values from the last index to the first.

    The program turns the order round, so they end up from the first to the last.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def argsort(values):
        return np.lexsort((-np.arange(len(values)), values))


class Draws:
    """In place of torch.randperm: given permutations first, then drawn ones."""

    def __init__(self, seed):
        self.random, self.given, self.drawn = np.random.default_rng(seed), [], []

    def __call__(self, size):
        perm = self.given.pop(0) if self.given else self.random.permutation(size)
        assert len(perm) == size
        self.drawn.append(np.asarray(perm))
        return torch.from_numpy(np.asarray(perm).astype(np.int64))

    def take(self):
        """The permutations since the last call, [L, N]."""
        drawn, self.drawn = np.stack(self.drawn), []
        return drawn


def program(path):
    """The module modeling_mplus of a checkout, on a CPU."""
    from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

    enable = classmethod(lambda cls, config, *a, **k: config)
    PreTrainedModel._check_and_enable_flash_attn_2 = enable
    sys.path.insert(0, str(path))
    module: Any = importlib.import_module("modeling_mplus")
    module._flash_attention_forward = attention
    return module


class Run:
    """One scenario: a fresh model, its draws, and what is written down of it."""

    def __init__(self, module, name, seed, creation_ages=False, **settings):
        from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]

        fields = json.loads((HERE / "config.json").read_text()) | settings
        config = LlamaConfig(**fields)
        config._attn_implementation = "flash_attention_2"
        self.module, self.name, self.creation_ages = module, name, creation_ages
        self.model = module.MPlus(config).float().eval()
        state = load_file(HERE / "tiny_model.safetensors")
        missing, extra = self.model.load_state_dict(state, strict=False)
        assert not extra and all("inv_freq" in name for name in missing), missing
        self.model.put_ltm_to_numpy()
        self.draws = torch.randperm = Draws(seed)
        self.random = np.random.default_rng(seed + 1)
        self.arrays, self.injects, self.queries = {}, 0, 0
        find = self.model.get_ltm
        self.model.get_ltm = lambda *a, **k: self.watch(find, *a, **k)
        self.seen = []
        if creation_ages:
            self.age_by_position()
        self.write(
            "init",
            memory_ages=np.stack(self.model.memory_ages).astype(int),
            ltm_ages=np.stack(self.model.ltm_ages),
        )

    def age_by_position(self):
        """Initial rows as old as their place says: the pool's last 0, then the store's.

        After loading, the program takes all of them for equally old.
        """
        rows, held = self.model.memory.shape[1], len(self.model.ltm[0])
        ages = np.arange(rows + held)[::-1]
        self.model.ltm_ages = [ages[:held].copy() for _ in self.model.ltm]
        self.model.memory_ages = [ages[held:].copy() for _ in self.model.ltm]

    def tokens(self, length, batch=1):
        """Random token ids [B, T]."""
        size = (batch, length)
        return torch.from_numpy(self.random.integers(0, 256, size))

    def write(self, name, **arrays):
        """Keeps arrays under scenario/name/."""
        for key, value in arrays.items():
            if torch.is_tensor(value):
                value = value.detach().numpy()
            value = np.asarray(value)
            kinds = {"f": np.float32, "i": np.int32, "b": np.bool_}
            kept = value.astype(kinds[value.dtype.kind])
            self.arrays[f"{self.name}/{name}/{key}"] = kept

    def update(self, ids, delta=None):
        """Injects and updates the pools; returns name, delta and drops."""
        model = self.model
        if self.creation_ages:
            # The line that the released file lost.
            model.memory_ages = [ages + model.num_tokens for ages in model.memory_ages]
        with torch.no_grad():
            delta = model.inject_memory(ids, delta_memory=delta, update_memory=True)
        self.injects += 1
        perm = self.draws.take()
        kept = perm.shape[1] - model.num_tokens
        split = np.sort(perm[:, :kept]), np.sort(perm[:, kept:])
        return f"inject{self.injects:02d}", delta[0], split

    def inject(self, ids, rows=False):
        """Injects ids [1, T]; `rows`: also writes every row that is held after it."""
        name, delta, (remaining, dropped) = self.update(ids)
        self.write(name, ids=ids, delta_memory=delta)
        self.write(name, remaining_idx=remaining, dropped_idx=dropped)
        self.state(name, rows)

    def state(self, name, rows):
        """Ages, counts and, if `rows`, the rows and keys that are held now."""
        model = self.model
        held = model.cached_dropped_memories is not None
        self.write(
            name,
            memory_ages=np.stack(model.memory_ages).astype(int),
            update_step=model.update_step,
            has_cache=held,
        )
        for layer in range(model.L):
            ages = np.asarray(model.ltm_ages[layer]).astype(int)
            self.write(name, **{f"ltm_ages_{layer}": ages})
            self.write(name, **{f"ltm_rf_{layer}": model.ltm_recall_frequencies[layer]})
            if rows:
                self.write(name, **{f"ltm_{layer}": model.ltm[layer]})
                self.write(name, **{f"ltm_keys_{layer}": model.ltm_keys[layer]})
        if rows:
            self.write(name, memory=model.memory)
        if held:
            ages = np.asarray(model.cached_dropped_memory_ages).astype(int)
            self.write(name, cache_ages=ages)
        if held and rows:
            self.write(name, cache_mem=model.cached_dropped_memories)
            self.write(name, cache_keys=model.cached_dropped_keys)

    def watch(self, find, layer, hidden, **settings):
        """The program's retrieval, and what it saw and chose."""
        model = self.model
        rows, indices = find(layer, hidden, **settings)
        block = model.model.layers[layer]
        every, keys = [model.ltm[layer]], [model.ltm_keys[layer]]
        ages = [model.ltm_ages[layer]]
        if model.cached_dropped_memories is not None:
            every.append(model.cached_dropped_memories[layer])
            keys.append(model.cached_dropped_keys[layer])
            ages.append(model.cached_dropped_memory_ages[layer])
        with torch.no_grad():
            queries = block.self_attn.query_proj(block.input_layernorm(hidden[0]))
            scores = (queries @ torch.cat(keys).T).sigmoid().mean(0).numpy()
        same = (torch.cat(every)[None] == rows[:, None]).all(-1)
        assert (same.sum(1) == 1).all()
        final = same.int().argmax(1).numpy()
        found = {
            "retr_scores": scores,
            "retr_sel": np.sort(final),
            "retr_final": final,
            "retr_final_ages": np.concatenate(ages)[final].astype(int),
        }
        self.seen.append((layer, found))
        return rows, indices

    def read(self, name, ids, by_index=False, **settings):
        """A forward pass of ids [B, T] with what it retrieved and a cache."""
        self.module.np, self.seen = ByIndex() if by_index else np, []
        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                labels=ids,
                use_cache=True,
                output_hidden_states=True,
                return_dict=True,
                **settings,
            )
        self.module.np = np
        self.write(name, ids=ids, logits=out.logits[0], loss=out.loss)
        self.write(name, hidden=torch.cat(out.hidden_states))
        for layer, found in self.seen:
            for key, value in found.items():
                self.write(name, **{f"{key}_{layer}": value})
        return out.past_key_values

    def query(self, length):
        """A read of random tokens in the program's order and in that of the index."""
        name, ids = f"query{self.injects:02d}", self.tokens(length)
        self.read(f"{name}/by_index", ids, by_index=True)
        self.read(name, ids)
        for key in ("hidden", *(f"retr_scores_{layer}" for layer in range(3))):
            del self.arrays[f"{self.name}/{name}/{key}"]


def replay(module, golden):
    """Scenario C of golden.npz again: the largest differences from it."""
    run = Run(module, "C", 0, creation_ages=True)
    worst = {"logits": 0.0, "delta": 0.0, "rows": 0.0}
    for number in range(12):
        name = f"C/inject{number:02d}"
        if number:
            remaining, dropped = (
                golden[f"{name}/{key}_idx"] for key in ("remaining", "dropped")
            )
            run.draws.given = list(np.concatenate([remaining, dropped], 1))
            _, delta, _ = run.update(torch.from_numpy(golden[f"{name}/ids"]).long())
            ages = np.stack(run.model.memory_ages)
            assert (ages == golden[f"{name}/memory_ages"]).all()
            wanted = golden[f"{name}/delta_memory"]
            worst["delta"] = max(worst["delta"], np.abs(delta.numpy() - wanted).max())
            for layer in range(run.model.L):
                wanted = golden.get(f"{name}/ltm_{layer}")
                if wanted is not None:
                    error = np.abs(run.model.ltm[layer].numpy() - wanted).max()
                    worst["rows"] = max(worst["rows"], error)
        query = f"C/query{number:02d}"
        if f"{query}/ids" in golden:
            run.read("again", torch.from_numpy(golden[f"{query}/ids"]).long())
            error = np.abs(run.arrays["C/again/logits"] - golden[f"{query}/logits"])
            worst["logits"] = max(worst["logits"], error.max())
            for layer in range(run.model.L):
                chosen = run.arrays[f"C/again/retr_final_{layer}"]
                assert (chosen == golden[f"{query}/retr_final_{layer}"]).all()
    return {key: float(value) for key, value in worst.items()}


def release(module):
    """A: the released semantics, chunks shorter than, as long as and longer than K."""
    run = Run(module, "A", 10)
    lengths = (12, 8, 5, 20, 8, 3, 24, 9, 8, 16)
    for number, length in enumerate(lengths, 1):
        run.inject(run.tokens(length), rows=number == 10)
        if number in (1, 4, 6, 10):
            run.query(6)
    return run.arrays


def every_update(module):
    """B: a merge at every update."""
    run = Run(module, "B", 20, update_ltm_frequency=1)
    for number, length in enumerate((8, 20, 11, 6, 16, 8, 13), 1):
        run.inject(run.tokens(length), rows=number == 7)
        if number in (2, 5, 7):
            run.query(5)
    return run.arrays


def prepared(module, name="P"):
    """P: four injects, ages from creation, so without ties; D to G go on from it."""
    run = Run(module, "P", 30, creation_ages=True)
    for length in (8, 14, 20, 10):
        run.inject(run.tokens(length))
    if name != "P":
        run.name, run.arrays = name, {}
    return run


def decoding(module):
    """D: a prefill, five tokens one by one, then three at once; also behind a delta."""
    run = prepared(module, "D")
    with torch.no_grad():
        delta = run.model.inject_memory(run.tokens(12))
    run.write("delta", delta_memory=delta[0])
    for name, settings in (("pool", {}), ("delta", {"delta_memory": delta})):
        cache = run.read(f"{name}/prefill", run.tokens(6), **settings)
        for step, length in enumerate((1, 1, 1, 1, 1, 3)):
            ids = run.tokens(length)
            with torch.no_grad():
                out = run.model(ids, past_key_values=cache, use_cache=True, **settings)
            cache = out.past_key_values
            run.write(f"{name}/step{step}", ids=ids, logits=out.logits[0])
    return run.arrays


def deltas(module):
    """E: memory tokens given by hand."""
    run = prepared(module, "E")
    first, second, pair = run.tokens(12), run.tokens(5), run.tokens(10, batch=2)
    with torch.no_grad():
        delta = run.model.inject_memory(first)
        chained = run.model.inject_memory(second, delta_memory=delta)
        batch = run.model.inject_memory(pair)
    run.write("compress", ids=first, delta_memory=delta[0])
    run.write("chained", ids=second, delta_memory=chained[0])
    run.write("batch", ids=pair, delta_memory=batch)
    run.read("alone", run.tokens(7), delta_memory=delta)
    both = torch.cat([delta, chained], dim=2)
    for name, given in (("beside", delta), ("beside_two", both)):
        ids = run.tokens(7)
        run.read(name, ids, delta_memory=given, cat_to_maximum_memory=True)
        kept = run.draws.take()[:, : -given.shape[2]]
        run.write(name, kept_idx=np.sort(kept))
    return run.arrays


def two_chunks(module):
    """F: gradients of the loss on a target that reads one chunk's memory alone."""
    run = prepared(module, "F")
    for name, length in (("long", 20), ("short", 5)):
        for parameter in run.model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None
        chunk, target = run.tokens(length), run.tokens(9)
        delta = run.model.inject_memory(chunk)
        out = run.model(target, delta_memory=delta, labels=target, return_dict=True)
        out.loss.backward()
        run.write(name, chunk=chunk, ids=target, delta_memory=delta[0], loss=out.loss)
        wanted = ("positional_emb", "bos_embedding")
        wanted += (".default.",) if name == "long" else (".0.self_attn.q_proj.lora",)
        for path, parameter in run.model.named_parameters():
            if parameter.grad is not None and any(word in path for word in wanted):
                run.write(f"{name}/grad", **{path: parameter.grad})
    return run.arrays


def retriever(module):
    """G: probabilities, losses and gradients of the retriever on the pool's rows."""
    run = prepared(module, "G")
    model = run.model
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    # A row counts as the document's if the last two chunks left it.
    labels = np.stack(model.memory_ages) < 2 * model.num_tokens
    latest = torch.zeros(labels.shape, dtype=torch.long)
    latest[:, -model.num_tokens :] = 1
    ids, run.seen = run.tokens(9), []
    out = model(
        ids,
        output_retriever_weights=True,
        encoder_query_indices=latest,
        output_hidden_states=True,
        return_dict=True,
    )
    total = 0.0
    for name, found in (
        ("decoder", out.retriever_weights),
        ("encoder", out.encoder_retriever_weights),
    ):
        p = torch.cat(found)
        positive = -torch.log(p[labels] + 1e-5).mean()
        negative = -torch.log(1 - p[~labels] + 1e-5).mean()
        loss = (positive + negative) / 2
        run.write(name, p=p, loss=loss, positive=positive, negative=negative)
        total = total + loss
    total.backward()
    run.write("read", ids=ids, positive=labels, loss=total, logits=out.logits[0])
    run.write("read", hidden=torch.cat(out.hidden_states))
    for path, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        assert any(name in path for name in ("query_proj", "key_proj")), path
        run.write("grad", **{path: parameter.grad})
    return run.arrays


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, required=True, help="the checkout")
    path = parser.parse_args().program
    if not (path / "modeling_mplus.py").is_file():
        raise SystemExit(f"--program has no modeling_mplus.py: {path}")
    module = program(path.resolve())
    with np.load(HERE / "golden.npz") as file:
        worst = replay(module, dict(file))
    print("largest differences from golden.npz:", worst)
    if max(worst.values()) > 1e-4:
        raise SystemExit("scenario C is not reproduced; nothing written")
    arrays = prepared(module).arrays
    scenarios = (release, every_update, decoding, deltas, two_chunks, retriever)
    for scenario in scenarios:
        arrays |= scenario(module)
    np.savez_compressed(HERE / "more.npz", **arrays)
    print(len(arrays), "arrays,", (HERE / "more.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
