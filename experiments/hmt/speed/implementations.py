"""The implementations of HMT's training step that are timed: ours and the authors'.

Weights are random, which does not change the time.
"""

import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.hmt.speed import official
from experiments.hmt.speed.operations import Shape, Trained
from memjax.data import Batch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import add_hmt
from memjax.models.language_model.config import Architecture
from memjax.models.lora import LoraConfig, add_lora
from memjax.training import OptimizerConfig
from memjax.training.optimizer import make_optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step

Implementation = Literal["official", "keep", "recompute"]


def backbone_config(shape: Shape) -> ModelConfig:
    """Our backbone of that shape, in float32."""
    return ModelConfig(
        mechanisms=(
            AttentionConfig(
                shape.width,
                shape.heads,
                shape.kv_heads,
                shape.width // shape.heads,
                capacity=2048,
            ),
        ),
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        model_dim=shape.width,
        hidden_dim=shape.hidden,
        tied_head=shape.tied,
        architecture=Architecture(scale_embedding=False),
        dtype="float32",
        remat=False,
    )


def llama_config(shape: Shape, **more: Any) -> Any:
    """transformers' settings of a Llama of that shape, and `more` beside them."""
    # Optional, and no other implementation's process should load it.
    import transformers  # pyright: ignore[reportMissingImports]

    return transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tied,
        **more,
    )


def llama(shape: Shape) -> Any:
    """transformers' Llama of that shape, its parameters random."""
    # Optional, and no other implementation's process should load it.
    import transformers  # pyright: ignore[reportMissingImports]

    return transformers.LlamaForCausalLM(llama_config(shape))


def ours(
    shape: Shape,
    batch: int,
    trained: Trained,
    activations: Literal["keep", "recompute"],
) -> Callable[[], float]:
    """Our step, compiled when it is first called; returns the loss."""
    backbone = LanguageModel(backbone_config(shape), key=jax.random.key(0))
    if trained == "lora":
        backbone = add_lora(backbone, LoraConfig(), jax.random.key(2))
    memory = HMTConfig(
        segment_length=shape.segment,
        num_sensory_tokens=shape.sensory,
        retrieval_dim=shape.retrieval_dim,
        activations=activations,
    )
    model = add_hmt(backbone, memory, key=jax.random.key(1))
    transform = make_optimizer(
        OptimizerConfig(
            learning_rate=1e-5,
            beta2=0.999,
            epsilon=1e-8,
            weight_decay=0.01,
            decay_vectors=True,
            max_gradient_norm=float("inf"),
        ),
        steps=1000,
    )
    settings = StepConfig(loss_on="last")
    holder = [init_train_state(model, transform, settings, batch)]
    update = jax.jit(make_train_step(model, transform, settings), donate_argnums=0)
    tokens = _tokens(shape, batch)
    # The last logits have no target.
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    items = (tokens, np.roll(tokens, -1, axis=1), mask, np.ones(batch, bool))
    one = Batch(*map(jnp.asarray, items))

    def step() -> float:
        holder[0], metrics = update(holder[0], one)
        jax.block_until_ready((holder[0], metrics))
        return float(metrics["loss"])

    return step


def authors(
    checkout: pathlib.Path, shape: Shape, batch: int, trained: Trained, threads: int
) -> Callable[[], float]:
    """The step of the authors' program; returns the loss."""
    # Optional, and no other implementation's process should load it.
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = official.build(checkout, llama(shape), shape, trained)
    adamw = official.adamw(model)
    tokens = torch.from_numpy(_tokens(shape, batch)).long()
    return lambda: official.training_step(model, adamw, tokens, shape.segment)


def build(
    implementation: Implementation,
    shape: Shape,
    batch: int,
    trained: Trained,
    threads: int,
    checkout: pathlib.Path | None = None,
) -> Callable[[], float]:
    """The training step of an implementation, which returns the loss."""
    if implementation == "official":
        assert checkout is not None
        return authors(checkout, shape, batch, trained, threads)
    return ours(shape, batch, trained, implementation)


def _tokens(shape: Shape, batch: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, shape.vocab, (batch, shape.tokens), dtype=np.int32)
