"""Makes `families/`: a tiny random checkpoint of each family and its logits.

    python tests/models/golden/make_family_goldens.py [FAMILY ...]

Needs torch and transformers; made with torch 2.13.0 and transformers 5.23.0, float32,
on a CPU. The logits are those of a batch read whole, and of the same batch with the
first tokens of its first row masked as padding.
"""

import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

OUT = Path(__file__).parent / "families"
BATCH, LENGTH, PADDING, VOCABULARY = 2, 20, 6, 64
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
GATED = SIZES | dict(intermediate_size=40, num_key_value_heads=2)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", factor=2.5)


def rope(theta, **scaling):
    return dict(rope_parameters=dict(rope_theta=theta, **scaling))


def configs():
    llama, qwen2 = transformers.LlamaConfig, transformers.Qwen2Config
    mistral, opt = transformers.MistralConfig, transformers.OPTConfig
    biased = dict(attention_bias=True, mlp_bias=True)
    windows = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    narrow = dict(word_embed_proj_dim=16, do_layer_norm_before=False)
    # Both kinds of layer among two; head widths that are not D / H.
    gemma = dict(
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
            full_attention=dict(rope_theta=1000.0, **LINEAR),
        ),
    )
    smollm3 = dict(no_rope_layers=[1, 0], tie_word_embeddings=True, **rope(1e4))
    return {
        "llama2": llama(**GATED | dict(num_key_value_heads=4)),
        "llama3": llama(**GATED, **rope(1000.0, **LLAMA3), tie_word_embeddings=True),
        "llama_linear": llama(**GATED, **rope(1000.0, **LINEAR), **biased),
        "llama_yarn": llama(**GATED, **rope(1000.0, **YARN)),
        "mistral": mistral(**GATED, sliding_window=7, head_dim=12),
        "qwen2": qwen2(**GATED, **rope(1e6), **windows, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**GATED, **rope(1e6), **windows, head_dim=12),
        "smollm3": transformers.SmolLM3Config(**GATED, **smollm3),
        "olmo2": transformers.Olmo2Config(**GATED, **rope(5e5)),
        "gemma3": transformers.Gemma3TextConfig(**GATED, **gemma),
        "opt": opt(**SIZES, ffn_dim=40),
        "opt_350m": opt(**SIZES, ffn_dim=40, **narrow),
    }


@torch.no_grad()
def make(name, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    # Larger than a model is drawn, biases and norms too: a mistake must show.
    for parameter in model.parameters():
        parameter.normal_(std=0.3 if parameter.ndim > 1 else 0.5)
    folder = OUT / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))
    mask = np.ones((BATCH, LENGTH), np.int64)
    mask[0, :PADDING] = 0
    ids = torch.from_numpy(tokens)
    np.savez_compressed(
        folder / "logits.npz",
        tokens=tokens.astype(np.int32),
        mask=mask.astype(bool),
        logits=model(ids).logits.numpy(),
        padded=model(ids, attention_mask=torch.from_numpy(mask)).logits.numpy(),
    )


if __name__ == "__main__":
    for name, config in configs().items():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            make(name, config)
