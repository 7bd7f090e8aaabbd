"""Prompt formats: by the model's chat template, or plain.

The memory has read the conversation so far, so a prompt has new text only: before the
first question the head of the template, before a later one the template's text between
an answer and the next question.
"""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jinja2
import jinja2.sandbox
import numpy as np
from jaxtyping import Int

from memjax.checks import short
from memjax.data import Tokenizer
from memjax.data.documents.tokenizer import JsonTokenizer
from memjax.models.checkpoints.text_interface import TextInterface

#: Turns of a sample conversation, which mark the parts of a template.
_ASKED, _ANSWERED = "memjax-question", "memjax-answer"


@runtime_checkable
class PromptFormat(Protocol):
    """Text around questions and answers.

    Attributes:
        stop: texts that end an answer and are no part of it.
        closing: text after an answer, before any further question.
    """

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def closing(self) -> str: ...

    def first(self, question: str, begins: bool = True) -> str:
        """The prompt of a conversation's first question.

        `begins` is whether the memory is empty.
        """
        ...

    def next(self, question: str) -> str:
        """The prompt of a later question, after `closing`."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainFormat:
    """Question and answer without a template: an answer is one paragraph."""

    stop: tuple[str, ...] = ("\n",)
    closing: str = ""

    def first(self, question: str, begins: bool = True) -> str:
        """The prompt of any question."""
        return ("" if begins else "\n\n") + f"Question: {question}\nAnswer:"

    def next(self, question: str) -> str:
        """The prompt of a later question."""
        return self.first(question, False)


class ChatFormat:
    """A chat template of Hugging Face: Jinja, run in its sandbox.

    Args:
        source: of the template.
        bos: text of the token that begins a text, "" if there is none.
        eos: of the token that ends one.

    Raises:
        ValueError: if the template is not sound, or leaves out questions or answers.
    """

    stop = ()

    def __init__(self, source: str, bos: str = "", eos: str = ""):
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise _refusal(error) from error
        self.closing = self._after_answer(False)
        following = self._after_answer(True, _ASKED)
        # Some templates write the end of an answer only before another question.
        if not following.startswith(self.closing):
            self.closing = ""
        if _ASKED not in following:
            raise ValueError("the chat template leaves out what is asked")

    def first(self, question: str, begins: bool = True) -> str:
        """The prompt with the head of the template, such as a system message."""
        prompt = self._render([_message("user", question)], True)
        return prompt if begins else prompt.removeprefix(self._tokens["bos_token"])

    def next(self, question: str) -> str:
        """The prompt without the turns before it."""
        return self._after_answer(True, question).removeprefix(self.closing)

    def _after_answer(self, prompts, *question):
        """The template's text after an answer."""
        turns = [_message("user", _ASKED), _message("assistant", _ANSWERED)]
        turns += [_message("user", text) for text in question]
        _, found, after = self._render(turns, prompts).partition(_ANSWERED)
        if not found:
            raise ValueError("the chat template leaves out what was answered")
        return after

    def _render(self, turns, prompts):
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=prompts, **self._tokens
            )
        # A template may fail as any program does.
        except Exception as error:
            raise _refusal(error) from error


def choose_format(text: TextInterface, template: bool = True) -> PromptFormat:
    """The prompt format for a model.

    Args:
        text: of the model.
        template: whether to use its chat template, where it has one.

    Raises:
        ValueError: on a template that cannot be used.
    """
    if not template or text.chat_template is None:
        return PlainFormat()
    ids = text.generation
    ends = next(iter(ids.eos_ids), None)
    name = functools.partial(_token_text, text.tokenizer)
    return ChatFormat(text.chat_template, name(ids.bos_id), name(ends))


def stop_tokens(text: TextInterface, prompt_format: PromptFormat) -> tuple[int, ...]:
    """Tokens that end an answer: the model's own, and the first of the closing.

    The files of many chat models name the end of a document only.
    """
    tokenizer, ends = text.tokenizer, text.generation.eos_ids
    if isinstance(tokenizer, JsonTokenizer) and prompt_format.closing:
        first = int(tokenizer.encode(prompt_format.closing)[0])
        known: dict[int, Any] = tokenizer.backend.get_added_tokens_decoder()
        if first in known and known[first].special:
            return tuple(dict.fromkeys((*ends, first)))
    return ends


def closing_tokens(
    tokenizer: Tokenizer, prompt_format: PromptFormat, answer: Int[np.ndarray, " T"]
) -> list[int]:
    """Tokens still to be read after those of an answer."""
    text = prompt_format.closing
    closing = tokenizer.encode(text).tolist() if text else []
    return closing[1:] if closing and closing[0] == answer[-1] else closing


def _message(role, content):
    return {"role": role, "content": content}


def _token_text(tokenizer, index):
    if index is None or not isinstance(tokenizer, JsonTokenizer):
        return ""
    return tokenizer.backend.id_to_token(index) or ""


@functools.cache
def _environment() -> jinja2.Environment:
    """Hugging Face's: a template reaches data only, and cannot change it."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.globals["raise_exception"] = refuse
    return made


def _refusal(error: Exception) -> ValueError:
    return ValueError(f"the chat template cannot be used: {short(error)}")
