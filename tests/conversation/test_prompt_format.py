"""Prompts by chat templates and without."""

import pytest

from memjax.conversation.prompt_format import (
    ChatFormat,
    PlainFormat,
    choose_format,
    stop_tokens,
    unread_closing,
)
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from tests import tiny

# As of SmolLM2 and Qwen2, and as of Mistral: answers end in other ways.
CHATML = """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
{% endif %}
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}
{% endfor %}"""


TURNS = [("Hello", "Hi.")]


def test_later_prompt_follows_the_answer_before():
    form = ChatFormat(CHATML)
    head = "<|im_start|>system\nBe brief.<|im_end|>\n"
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert form.prompt("Hi") == head + turn
    assert form.closing == "<|im_end|>\n"
    assert form.prompt("Hi", TURNS) == turn


def test_prompt_after_a_text_has_no_bos_token():
    form = ChatFormat(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    assert form.prompt("Hi").startswith("<s>[INST] Hi")
    assert form.prompt("Hi", begins=False).startswith("[INST] Hi")
    assert form.closing.startswith("</s>")
    assert form.prompt("Hi", TURNS).startswith("[INST] Hi")


def test_without_a_template_an_answer_is_a_paragraph():
    text = TextInterface(tiny.tokenizer(), CHATML)
    assert isinstance(choose_format(text, template=False), PlainFormat)
    assert isinstance(choose_format(TextInterface(tiny.tokenizer())), PlainFormat)
    form = PlainFormat()
    assert form.prompt("Who?") == "Question: Who?\nAnswer:"
    later = form.prompt("Who?", TURNS, begins=False)
    assert later == "\n\nQuestion: Who?\nAnswer:" and form.stop == ("\n",)


def test_system_message_is_at_the_head_alone():
    form = ChatFormat(CHATML)
    first = form.prompt("Who?", system="Be brief.")
    assert first.index("system") < first.index("Be brief.") < first.index("Who?")
    later = form.prompt("Who?", TURNS, system="Be brief.")
    assert later == form.prompt("Who?", TURNS)


@pytest.mark.parametrize(
    "source,message",
    [
        ("{% for m in messages %}", "template cannot be used: Unexpected end"),
        ("{{ messages[7].content }}", "template cannot be used: "),
        ("{{ raise_exception('No.') }}", "template cannot be used: No."),
        ("{{ messages[0].content }}", "leaves out what was answered"),
        ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "out what is asked"),
        # Nothing of Python can be reached.
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot be used: "),
        ("{{ messages.append(1) }}", "template cannot be used: "),
    ],
)
def test_unusable_template_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        ChatFormat(source)


def test_answer_ends_with_the_turn_token_of_the_template():
    """Though the model's files name another token that ends a text."""
    source = "{% for m in messages %}{{ m.content + '<end>b' }}{% endfor %}"
    text = TextInterface(
        tiny.tokenizer(), source, generation=GenerationConfig(eos_ids=(5,))
    )
    form = choose_format(text)
    assert stop_tokens(text, form) == (5, 0)
    assert stop_tokens(text, PlainFormat()) == (5,)
    # What the answer ended with has been read.
    tokenizer = tiny.tokenizer()
    assert unread_closing(tokenizer, form, 0) == "b"
    assert unread_closing(tokenizer, form, 7) == "<end>b"
