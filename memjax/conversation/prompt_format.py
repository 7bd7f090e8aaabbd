"""Prompt formats: by the model's chat template, or plain.

The memory has read the conversation so far, so a prompt has new text only: before the
first question the head of the template, before a later one the template's text between
an answer and the next question.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from memjax.conversation.chat_template import render
from memjax.data import Tokenizer
from memjax.data.documents.pieces import encode_after
from memjax.data.documents.tokenizer import JsonTokenizer, encode_prompt
from memjax.models.checkpoints.text_interface import TextInterface

#: Marks of the parts of a template; in no text that a person writes.
_ASKED, _ANSWERED = "\ue000question\ue001", "\ue000answer\ue001"
_NO_TOKENS: Mapping[str, str] = types.MappingProxyType({})


@runtime_checkable
class PromptFormat(Protocol):
    """Text around questions and answers.

    Attributes:
        stop: texts that end an answer and are no part of it.
        closing: text after an answer, before any further question.
        begins_itself: whether a first prompt has the tokens that begin a text.
    """

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def closing(self) -> str: ...

    @property
    def begins_itself(self) -> bool: ...

    def prompt(
        self,
        question: str,
        turns: Sequence[tuple[str, str]] = (),
        begins: bool = True,
        system: str = "",
    ) -> str:
        """The prompt of a question, after `closing` if there are turns.

        Args:
            question: the text.
            turns: questions and answers before it.
            begins: whether the memory is empty.
            system: message before the first question; "" for the template's own.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainFormat:
    """Question and answer without a template: an answer is one paragraph."""

    stop: tuple[str, ...] = ("\n",)
    closing: str = ""
    begins_itself: bool = False

    def prompt(
        self,
        question: str,
        turns: Sequence[tuple[str, str]] = (),
        begins: bool = True,
        system: str = "",
    ) -> str:
        """The prompt of a question."""
        head = "" if begins else "\n\n"
        head += f"{system}\n\n" if system and not turns else ""
        return f"{head}Question: {question}\nAnswer:"


class ChatFormat:
    """A chat template of Hugging Face.

    Args:
        source: of the template, in Jinja.
        special_tokens: texts by the names that it has for them, such as "bos_token".

    Raises:
        ValueError: if the template fails, or leaves out questions or answers.
    """

    stop, begins_itself = (), True

    def __init__(self, source: str, special_tokens: Mapping[str, str] = _NO_TOKENS):
        self._source, self._tokens = source, dict(special_tokens)
        turn = [_message("user", _ASKED), _message("assistant", _ANSWERED)]
        more = [*turn, _message("user", _ASKED)]
        closed, following = map(
            _after_answer, self._render((turn, False), (more, True))
        )
        # Some templates write the end of an answer only before another question.
        self.closing = closed if following.startswith(closed) else ""
        if _ASKED not in following:
            raise ValueError("the chat template leaves out what is asked")

    def prompt(
        self,
        question: str,
        turns: Sequence[tuple[str, str]] = (),
        begins: bool = True,
        system: str = "",
    ) -> str:
        """The prompt with the head of the template, or what follows the last answer.

        The template sees all turns: some count them.
        """
        asked = _message("user", question)
        head = [_message("system", system)] if system else []
        if not turns:
            text = self._render(([*head, asked], True))[0]
            bos = self._tokens.get("bos_token", "")
            return text if begins else text.removeprefix(bos)
        before = [
            _message(role, text)
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        before[-1]["content"] += _ANSWERED
        after = _after_answer(self._render(([*head, *before, asked], True))[0])
        return after.removeprefix(self.closing)

    def _render(self, *conversations):
        return render(self._source, conversations, self._tokens)


def _after_answer(text: str) -> str:
    """The text after the marked answer."""
    _, found, after = text.rpartition(_ANSWERED)
    if not found:
        raise ValueError("the chat template leaves out what was answered")
    return after


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
    return ChatFormat(text.chat_template, text.template_tokens())


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


def encode_part(
    tokenizer: Tokenizer, text: str, before: str | None, begins_itself: bool
) -> Int[np.ndarray, " T"]:
    """Tokens of a text of a conversation.

    Args:
        tokenizer: of the model.
        text: to be read.
        before: what is still to be read before it; None in an empty memory.
        begins_itself: whether it has the tokens that begin a text.

    Raises:
        ValueError: on a text of less than 2 tokens.
    """
    if before is not None:
        tokens = encode_after(tokenizer, before + text)
    elif begins_itself:
        tokens = tokenizer.encode(text)
    else:
        tokens = encode_prompt(tokenizer, text)
    if len(tokens) < 2:
        raise ValueError(
            f"a text must have at least 2 tokens, got {len(tokens)} of {text!r}"
        )
    return tokens.astype(np.int32)


def unread_closing(tokenizer: Tokenizer, prompt_format: PromptFormat, last: int) -> str:
    """The closing without the token `last`, if the answer ended with that."""
    text = prompt_format.closing
    if text and int(tokenizer.encode(text)[0]) == last:
        return text.removeprefix(tokenizer.decode(np.array([last])))
    return text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
