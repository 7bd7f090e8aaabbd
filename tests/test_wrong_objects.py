"""An argument of the wrong kind is refused by name, at each public entrance."""

# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
import memjax_kernels
from memjax.data import (
    NEEDLE_TASKS,
    RowConfig,
    align,
    assign_splits,
    associative_recall,
    copy_task,
    dilate,
    interleave,
    mixed_batches,
    multi_context,
    needle_batch,
    needle_sample,
    open_documents,
    packed_batches,
    pick_facts,
    prepare,
    read_questions,
    unrelated,
)
from memjax.evaluation import (
    answer_perplexity,
    drop_leaked_targets,
    log2_bins,
    loss_by_position,
    mask_losses,
    most_sensitive,
    perplexity,
    recall_distances,
    recall_summary,
    score_answers,
    token_losses,
)
from memjax.evaluation.losses import TokenLosses
from memjax.mechanisms import (
    AttentionConfig,
    GLAConfig,
    HybridConfig,
    LinearAttentionConfig,
    SlidingWindowConfig,
    TrellisConfig,
    replace_rows,
)
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models import (
    HMTConfig,
    LanguageModel,
    LoraConfig,
    ModelConfig,
    MPlusConfig,
    ReReadWindow,
    Sampling,
    add_hmt,
    add_lora,
    add_memory,
    add_mplus,
    add_snapkv,
    generate,
    initialise_from_teacher,
    limit_attention,
    save_adapter,
    start_multiple,
    stop_strings,
)
from memjax.nnx import tabulate
from memjax.training import (
    LoopConfig,
    OptimizerConfig,
    StepConfig,
    init_train_state,
    make_optimizer,
    make_train_step,
)
from tests import tiny

KEY = jax.random.key(0)
CONFIG = TrellisConfig(16, 2, 8, 8)
CHARACTERS, PASSKEY = tiny.tokenizer(), NEEDLE_TASKS["S-NIAH-PK"]
ADAM = make_optimizer(OptimizerConfig(), 3)
X, TOKENS = jnp.zeros((1, 5, 16)), jnp.ones((1, 5), int)
LOSSES = TokenLosses(*[np.ones((1, 2))] * len(TokenLosses._fields))._replace(
    kinds=["prose"]
)


def _memory(state=None, x=X):
    memory = memjax.nnx.Memory(CONFIG, key=KEY)
    return memory(memory.init_state(1) if state is None else state, x)


def _reset(mask, state=None):
    memory = memjax.nnx.Memory(CONFIG, key=KEY)
    return memory.reset(memory.init_state(1) if state is None else state, mask)


def _other_state(config):
    return config.build().init_state(1)


def _generate(**options):
    return generate(tiny.llama(), None, TOKENS, **({"max_new_tokens": 1} | options))


def _mechanism(name, x):
    mechanism = CONFIG.build()
    read = getattr(mechanism, name)
    return read(mechanism.init_params(KEY), mechanism.init_state(1), x)


def _save_memory(**options):
    model = tiny.llama()
    memjax.save_memory("here", model, model.init_state(1), **options)


def _add_memory(layers):
    return add_memory(tiny.llama(), memory="trellis", layers=layers, window=4, key=KEY)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _memory(x=X[:, :0]), r"x must be .* no axis empty, got \[1, 0, 16\]"),
        (lambda: _memory(x=X[0, 0]), r"x must be .* or \[B, D\], got \(16,\)"),
        (lambda: _memory(X, ()), "x must be .* got tuple"),
        (lambda: _memory(()), "state must be the arrays that init_state gives"),
        (
            lambda: _memory(_other_state(LinearAttentionConfig(16, 2, 8, 8))),
            "state must be .* that init_state gives, a BlockState, got one of another",
        ),
        (
            lambda: _memory(_other_state(TrellisConfig(16, 2, 8, 8, chunk_size=3))),
            "got one of another mechanism or chunk_size",
        ),
        (lambda: _reset([True]), r"mask must be a bool array \[B\], got \[True\]"),
        (lambda: _reset(jnp.array([True]), ()), "state must be the arrays"),
        (lambda: CONFIG.build().init_state(2.5), "batch must be an integer, got 2.5"),
        (lambda: CONFIG.build().init_state(-1), "batch must be at least 1, got -1"),
        (lambda: memjax.nnx.Memory(GLAConfig, key=KEY), "config must be a mechanism"),
        (lambda: memjax.nnx.Memory(CONFIG, key=X[0, 0]), "key must be a jax.random"),
        (lambda: TrellisConfig(16, 2, 8, 8, forget="no"), "forget must be a bool"),
        (lambda: TrellisConfig(16, 2, 8, "8"), "value_dim must be an integer, got '8'"),
        (lambda: GLAConfig(16, 2, 8, 8, norm_epsilon="x"), "norm_epsilon must be a nu"),
        (lambda: SlidingWindowConfig(16, 2, 2, 8, sinks=1.5), "sinks must be an integ"),
        (lambda: RopeScaling("linear", "2"), "factor must be a number, got '2'"),
        (lambda: AttentionConfig(16, 2, 2, 8, rope_scaling="yarn"), "a RopeScaling"),
        (lambda: HybridConfig(CONFIG, CONFIG), "window must be a SlidingWindowConfig"),
        (lambda: ModelConfig(mechanisms=CONFIG), "mechanisms must be a tuple"),
        (lambda: ModelConfig(mechanisms=("gla",)), r"mechanisms\[0\] must be a mech"),
        (lambda: HMTConfig(segment_length=2.5), "segment_length must be an integer"),
        (lambda: MPlusConfig(store_size=10**13), "store_size must be at most"),
        (lambda: add_hmt(None, tiny.HMT, key=KEY), "backbone must be a LanguageModel"),
        (lambda: add_mplus(None, tiny.MPLUS, key=KEY), "backbone must be a Language"),
        (lambda: limit_attention(None, 4), "model must be a LanguageModel, got None"),
        (lambda: ReReadWindow(None, reread=1, segment=1), "backbone must be a Lang"),
        (lambda: add_snapkv(tiny.llama(), {}), "config must be a SnapKVConfig"),
        (lambda: add_lora(tiny.llama(), {}, KEY), "config must be a LoraConfig"),
        (lambda: add_lora(tiny.llama(), LoraConfig(), 0), "key must be a jax.random"),
        (lambda: _add_memory(None), "layers must be numbers .* got None"),
        (lambda: _add_memory((True,)), "layers must be numbers"),
        (lambda: tiny.llama().init_state("2"), "batch must be an integer, got '2'"),
        (
            lambda: tiny.llama()(tiny.llama().init_state(1), [[1]]),
            r"tokens must be an array \[B, T\], got \[\[1\]\]",
        ),
        (
            lambda: tiny.llama()(tiny.llama().init_state(1), TOKENS[:, :0]),
            "tokens must be .* T >= 1",
        ),
        (lambda: generate(tiny.LLAMA, None, TOKENS, 4, key=KEY), "model must be a Mod"),
        (lambda: _generate(key=KEY, sampling={}), "sampling must be a Sampling"),
        (lambda: _generate(key=KEY, max_new_tokens=2.5), "max_new_tokens must be an i"),
        (
            lambda: _generate(key=KEY, stop_tokens=(99,)),
            "stop_tokens must be in",
        ),
        (lambda: Sampling(temperature="1"), "temperature must be a number, got '1'"),
        (lambda: Sampling(top_k=2.5), "top_k must be an integer, got 2.5"),
        (lambda: memjax.load(["a"]), r"path must be a str or a Path, got \['a'\]"),
        (lambda: _mechanism("step", X), r"x must be an array \[B, D\]"),
        (lambda: _mechanism("apply", X[0]), r"x must be an array \[B, T, D\]"),
        (lambda: memjax.nnx.Memory("trellis", key=KEY), "config must be .*'trellis'"),
        (lambda: LanguageModel("name", key=KEY), "config must be a ModelConfig"),
        (lambda: LanguageModel(tiny.LLAMA, key=0), "key must be a jax.random.key"),
        (lambda: LanguageModel(tiny.LLAMA, rngs=0), "rngs must be nnx.Rngs"),
        (lambda: add_hmt(tiny.llama(), {}, key=KEY), "config must be a HMTConfig"),
        (lambda: add_mplus(tiny.llama(), {}, key=KEY), "config must be a MPlusConfig"),
        (lambda: _add_memory("auto"), "layers must be numbers .* got 'auto'"),
        (lambda: tiny.llama()(None, TOKENS), "state must have 2 parts, .* NoneType"),
        (lambda: tiny.llama()(TOKENS, None), "state must have 2 parts"),
        (lambda: generate(tiny.llama(), None, TOKENS, 4, key=0), "key must be a jax"),
        (lambda: token_losses(tiny.llama(), [TOKENS[0]]), "a document must be a Tok"),
        (lambda: perplexity(LOSSES, kind="poem"), "kind must be one of .*'prose'"),
        (lambda: tiny.llama().save(None), "folder must be on a disk, got None"),
        (lambda: tiny.llama().save("gs://a/b"), "folder must be on a disk"),
        (lambda: tiny.llama().save("ftp://a/b"), "must be a path or a URL of gs://"),
        (lambda: tiny.llama().save("here", "text"), "text must be a TextInterface"),
        (lambda: save_adapter(None, "here", base=""), "model must be a LanguageModel"),
        (lambda: _save_memory(note={"a": KEY}), "note must be a JSON object: Object"),
        (lambda: _save_memory(note=[1]), r"note must be a Mapping, got \[1\]"),
        (lambda: _save_memory(tokenizer="x"), "tokenizer must be a Tokenizer, got 'x'"),
        (lambda: perplexity(None), "losses must be a TokenLosses, got None"),
        (lambda: token_losses(None, []), "model must be a Model, got None"),
        (lambda: loss_by_position({}, [0, 1]), "losses must be a TokenLosses, got {}"),
        (lambda: log2_bins("9"), "longest must be an integer, got '9'"),
        (lambda: mask_losses(LOSSES, [1]), r"mask must be a ndarray, got \[1\]"),
        (lambda: drop_leaked_targets(LOSSES, LOSSES), "model must be a Model"),
        (lambda: answer_perplexity(LOSSES), "answers must be a AnswerScores"),
        (
            lambda: score_answers(tiny.llama(), [1], tokens_per_call=4),
            r"inputs\[0\] mu",
        ),
        (lambda: copy_task(KEY, "2", 3, 8), "batch must be an integer, got '2'"),
        (lambda: associative_recall(0, 2, 3, 8), "key must be a jax.random.key"),
        (lambda: pick_facts(None, seed=0), "facts must be a Sequence, got None"),
        (lambda: pick_facts([1], seed=0), r"facts\[0\] must be a Question, got 1"),
        (lambda: pick_facts([], seed="0"), "seed must be an integer, got '0'"),
        (lambda: unrelated([], None), "fact must be a Question, got None"),
        (lambda: read_questions("a.jsonl"), "path must be a Path, got 'a.jsonl'"),
        (lambda: multi_context(["a"], 2, CHARACTERS), r"items\[0\] must be a Question"),
        (lambda: multi_context([], 2, None), "tokenizer must be a Tokenizer, got None"),
        (lambda: interleave(["a"]), r"documents\[0\] must be a TokenisedDocument"),
        (lambda: interleave(3), "documents must be a Sequence, got 3"),
        (lambda: dilate([], filler="$"), "filler must be an integer, got '\\$'"),
        (lambda: packed_batches(3, 4, 2, 0), "documents must be a Sequence, got 3"),
        (lambda: assign_splits("x"), r"documents\[0\] must be a Document, got 'x'"),
        (lambda: open_documents(None), "source must be a str, got None"),
        (lambda: prepare("x", "here"), "config must be a PrepareConfig, got 'x'"),
        (lambda: needle_sample([0], None, 9, CHARACTERS), "task must be a NeedleTask"),
        (lambda: needle_sample(0, PASSKEY, 9, CHARACTERS), "seed must be a Sequence"),
        (lambda: needle_sample([0], PASSKEY, 9, None), "tokenizer must be a Tokeniz"),
        (lambda: needle_sample([0], PASSKEY, "9", CHARACTERS), "length must be an int"),
        (lambda: needle_batch(3, 2, PASSKEY, 9, CHARACTERS), "seed must be a Sequence"),
        (lambda: recall_summary([1], [1]), r"distances must be a ndarray, got \[1\]"),
        (lambda: recall_summary(np.ones(2), np.ones(1)), r"held must be \[R\] as dist"),
        (lambda: recall_distances([], None, None), "scores must be"),
        (lambda: most_sensitive(None, 1), "rises must be numbers, got None"),
        (lambda: most_sensitive("x", 1), "rises must be numbers, got 'x'"),
        (lambda: stop_strings(str, 3), "strings must be a Sequence, got 3"),
        (lambda: stop_strings(str, [1]), r"strings\[0\] must be a str, got 1"),
        (lambda: start_multiple("x"), r"mechanisms\[0\] must be a MechanismConfig"),
        (lambda: replace_rows([1], [1], jnp.ones(1, bool)), "state must be arrays"),
        (
            lambda: initialise_from_teacher(None, tiny.LLAMA, TOKENS),
            "model must be a L",
        ),
        (
            lambda: initialise_from_teacher(tiny.llama(), None, TOKENS),
            "teacher must be a ModelConfig, got None",
        ),
        (
            lambda: initialise_from_teacher(tiny.llama(), tiny.LLAMA, [1]),
            r"tokens must be an array \[R, T\], got \[1\]",
        ),
        (lambda: tabulate(None), "module must be a Module, got None"),
        (lambda: make_optimizer({}, 3), "config must be a OptimizerConfig, got {}"),
        (lambda: make_optimizer(OptimizerConfig(), "3"), "steps must be an integer"),
        (lambda: init_train_state(None, ADAM, StepConfig(), 1), "model must be a Mod"),
        (
            lambda: init_train_state(tiny.llama(), None, StepConfig(), 1),
            "optimizer must be an optax.GradientTransformation, got None",
        ),
        (lambda: init_train_state(tiny.llama(), ADAM, {}, 1), "config must be a StepC"),
        (lambda: make_train_step(None, ADAM, StepConfig()), "model must be a Model"),
        (lambda: packed_batches([], 4, 2, 0), "documents is empty"),
        (lambda: mixed_batches(3, [1], 4, 2, 0), "sources must be a Sequence, got 3"),
        (lambda: mixed_batches([[]], ["a"], 4, 2, 0), r"weights\[0\] must be a Real"),
        (lambda: align(3, 8, 1, np.ones(9, int)), "inputs must be a Sequence, got 3"),
        (
            lambda: align([], 8, 1, None),
            "preamble must be an array of tok",
        ),
        (lambda: score_answers(None, [], tokens_per_call=4), "model must be a Model"),
        (lambda: loss_by_position(LOSSES, None), "edges must be a Sequence, got None"),
        (lambda: add_lora(None, LoraConfig(), KEY), "model must be a LanguageModel"),
        (lambda: memjax.save_memory("here", None, ()), "model must be a Model"),
        (lambda: OptimizerConfig(beta1="x"), "beta1 must be a number, got 'x'"),
        (lambda: StepConfig(accumulate=None), "accumulate must be a number, got None"),
        (lambda: LoopConfig(9, profile="x"), r"profile\[0\] must be a int, got 'x'"),
        (lambda: LoopConfig(9, profile=(1,)), "profile must be two steps"),
        (lambda: LoopConfig(9, writers=None), "writers must be a Sequence, got None"),
        (lambda: LoopConfig(9, minutes="x"), "minutes must be a number, got 'x'"),
        (lambda: RowConfig(join=3.5), "join must be a str, got 3.5"),
        (lambda: LoraConfig(targets=None), "targets must be a Sequence, got None"),
        (lambda: HMTConfig(summary_fraction="x"), "summary_fraction must be a number"),
        (lambda: MPlusConfig(alpha=None), "alpha must be a number, got None"),
        (lambda: LoopConfig(steps="9"), "steps must be an integer, got '9'"),
        (lambda: memjax.load("owner/name", dtype="float16"), "dtype must be one of"),
        (lambda: memjax_kernels.causal_attention(*[X[..., None]] * 3), "cannot run"),
        (lambda: memjax_kernels.hippo(X, X[0]), "features must have shape"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_objects_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
