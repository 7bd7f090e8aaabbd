"""The commands `memjax tell`, `ask` and `chat`: a model with a lasting memory."""

from pathlib import Path
from typing import Annotated

import tyro

from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.cli.texts import chat_loop, rows
from memjax.cli.texts.drawing import Drawing
from memjax.conversation import Conversation
from memjax.data.documents.pieces import escape_control_tokens
from memjax.models.language_model.config import Dtype
from memjax.status import Status

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


def tell(
    model: Model,
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    memory: Path,
    again: bool = False,
    escape: bool = False,
    dtype: Dtype | None = None,
) -> int:
    """Reads text files into a memory.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        files: texts, in this order, "-" for standard input; the memory is saved after
            each.
        memory: folder of the memory; created, or continued.
        again: read texts once more that the memory has read before.
        escape: read control tokens in the texts, as "<|im_end|>", as plain text.
        dtype: of the activations of a model without a run; None is float32.
    """
    if not files:
        raise ValueError("files must be at least one text, got none")
    texts = [(file, rows.read_text(file)) for file in files]
    enable_compilation_cache()
    with Status(f"loading {model}", "tensors") as status:
        talk = Conversation.open(model, memory, dtype=dtype, progress=status)
    with talk:
        if escape:
            texts = [(f, escape_control_tokens(talk.tokenizer, t)) for f, t in texts]
        chat_loop.open_block(talk)
        for file, text in texts:
            chat_loop.require_new(talk, file, text, again, "--again")
        for file, text in texts:
            chat_loop.tell_one(talk, file, text)
    return 0


def ask(
    model: Model,
    question: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION")
    ] = "",
    /,
    *,
    memory: Path,
    prompts: Path | None = None,
    begin: str = "",
    tokens: int = 256,
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1,
    drawing: Annotated[Drawing, tyro.conf.arg(name="")] = Drawing(),  # noqa: B008
    seed: int = 0,
    template: bool = True,
    json: bool = False,
    logprobs: bool = False,
    dtype: Dtype | None = None,
) -> int:
    """Answers a question from a memory, without changing it.

    Args:
        model: the model of the memory, as in `memjax tell`.
        question: the question, in plain words, "-" for standard input; or `prompts`.
        memory: folder of the memory.
        prompts: a file of questions: lines of .txt, or of .jsonl with a field "prompt".
        begin: first words of the answer: a base model, trained to complete text,
            answers better with them.
        tokens: maximum tokens of the answer.
        n: answers to each question.
        drawing: how tokens are drawn.
        seed: of the sampling.
        template: use the model's chat template, if it has one.
        json: print a line of JSON for each answer: prompt, text, tokens, finish_reason.
        logprobs: with --json, also the log-probability of each token.
        dtype: of the activations of a model without a run; None is float32.
    """
    temperature = drawing.temperature
    rows.check_output(n=n, json=json, logprobs=logprobs, temperature=temperature)
    if bool(question) == (prompts is not None):
        raise ValueError("give either a QUESTION or --prompts, and not empty")
    if prompts is not None:
        questions = rows.read_prompts(prompts)
    else:
        is_read = question == rows.STDIN
        questions = [rows.read_text(Path(question)) if is_read else question]
    enable_compilation_cache()
    with Status(f"loading {model}", "tensors") as status:
        talk = Conversation.look(
            model, memory, dtype=dtype, template=template, progress=status
        )
    options = {
        "begin": begin,
        "limit": tokens,
        "sampling": drawing.sampling(talk.generation),
    }
    with talk, chat_loop.interrupts() as interrupted:
        chat_loop.open_block(talk)
        asked = [(text, seed + i) for text in questions for i in range(n)]
        for i, (text, own) in enumerate(asked):
            what = "reading" if i else "compiling, and reading"
            with Status(what, "tokens") as status:
                write = chat_loop.writer(status)
                answer = talk.query(
                    text,
                    seed=own,
                    write=None if json else write,
                    interrupted=interrupted,
                    progress=status,
                    **options,
                )
            if json:
                reason = "stop" if answer.ended or interrupted() else "length"
                rows.Row(text, answer.text, answer.ids, reason, answer.log_probs).show(
                    logprobs
                )
            else:
                print(end=rows.BETWEEN if i + 1 < len(asked) else "\n", flush=True)
                rows.require_said(answer.text)
            if interrupted():
                break
    return 0


def chat(
    model: Model,
    /,
    memory: Path,
    tokens: int = 256,
    drawing: Annotated[Drawing, tyro.conf.arg(name="")] = Drawing(),  # noqa: B008
    seed: int = 0,
    template: bool = True,
    dtype: Dtype | None = None,
) -> int:
    """Chats with a model; the memory is saved after each turn, and continued later.

    Reads one message per line, from a pipe too. /help lists its commands.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        memory: folder of the memory; created, or continued.
        tokens: maximum tokens of an answer.
        drawing: how tokens are drawn.
        seed: of the sampling.
        template: use the model's chat template, if it has one.
        dtype: of the activations of a model without a run; None is float32.
    """
    enable_compilation_cache()
    with Status(f"loading {model}", "tensors") as status:
        talk = Conversation.open(
            model, memory, dtype=dtype, template=template, progress=status
        )
    with talk:
        sampling = drawing.sampling(talk.generation)
        options = {"limit": tokens, "sampling": sampling, "seed": seed}
        chat_loop.ChatLoop(talk, options).run()
    return 0
