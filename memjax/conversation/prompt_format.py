"""How a question becomes a prompt: by the model's chat template, or plainly.

A memory has read what was said before, so that only what is new is written: the first
question of a conversation with all that the template sets before it, later ones with
what the template sets between an answer and the next question.
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

#: Turns of a made-up conversation, by which a template's parts are told apart.
_ASKED, _ANSWERED = "memjax-question", "memjax-answer"


@runtime_checkable
class PromptFormat(Protocol):
    """What stands around questions and answers.

    Attributes:
        stop: texts that end an answer and are no part of it.
        closing: what follows an answer that nothing has been asked after yet.
    """

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def closing(self) -> str: ...

    def first(self, question: str, begins: bool = True) -> str:
        """The prompt of a conversation's first question.

        `begins` says that nothing stands before it, as a text that was told.
        """
        ...

    def next(self, question: str) -> str:
        """The prompt of a later one, behind `closing`."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainFormat:
    """For a model without a template: an answer is one paragraph."""

    stop: tuple[str, ...] = ("\n",)
    closing: str = ""

    def first(self, question: str, begins: bool = True) -> str:
        """The prompt of any question."""
        return ("" if begins else "\n\n") + f"Question: {question}\nAnswer:"

    def next(self, question: str) -> str:
        """The same."""
        return self.first(question, False)


class ChatFormat:
    """By a chat template of Hugging Face: Jinja, run in its sandbox.

    Args:
        source: of the template.
        bos: text of the token that begins a text, "" if there is none.
        eos: of the token that ends one.

    Raises:
        ValueError: if the template is not sound, or leaves out what was said.
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
        """The prompt with what the template begins with, as a system's message."""
        prompt = self._render([_message("user", question)], True)
        return prompt if begins else prompt.removeprefix(self._tokens["bos_token"])

    def next(self, question: str) -> str:
        """The prompt without what was said before."""
        return self._after_answer(True, question).removeprefix(self.closing)

    def _after_answer(self, prompts, *question):
        """What the template writes behind an answer."""
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
    """How to ask a model.

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


def stop_tokens(text: TextInterface, form: PromptFormat) -> tuple[int, ...]:
    """Tokens that end an answer: the model's own, and one that begins the closing.

    Files of chat models often name the end of a document alone.
    """
    tokenizer, ends = text.tokenizer, text.generation.eos_ids
    if isinstance(tokenizer, JsonTokenizer) and form.closing:
        first = int(tokenizer.encode(form.closing)[0])
        known: dict[int, Any] = tokenizer.backend.get_added_tokens_decoder()
        if first in known and known[first].special:
            return tuple(dict.fromkeys((*ends, first)))
    return ends


def closing_tokens(
    tokenizer: Tokenizer, form: PromptFormat, answer: Int[np.ndarray, " T"]
) -> list[int]:
    """What is still to be read behind the tokens of an answer."""
    closing = tokenizer.encode(form.closing).tolist() if form.closing else []
    return closing[1:] if closing and closing[0] == answer[-1] else closing


def _message(role, content):
    return {"role": role, "content": content}


def _token_text(tokenizer, index):
    if index is None or not isinstance(tokenizer, JsonTokenizer):
        return ""
    return tokenizer.backend.id_to_token(index) or ""


@functools.cache
def _environment() -> jinja2.Environment:
    """As Hugging Face's: what a template can reach is data, and stays as it is."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    made.globals["raise_exception"] = refuse
    return made


def _refusal(error: Exception) -> ValueError:
    return ValueError(f"the chat template cannot be used: {short(error)}")
