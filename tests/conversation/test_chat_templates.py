"""Chat templates are rendered as transformers renders them, and within limits."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from memjax.conversation import chat_template, template_program
from memjax.conversation.chat_template import render
from memjax.conversation.prompt_format import ChatFormat
from memjax.models.checkpoints.text_interface import read_text_interface
from tests import tiny

#: With the structure of the known families, written for these tests.
TEMPLATES = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
SYSTEM = {"role": "system", "content": " Be brief, <b>& \u00e9</b>.\n"}
TURNS = [
    {"role": role, "content": text}
    for turn in (
        ("user", "  Who? "),
        ("assistant", "<think>\nhm\n</think>\n\nMe. "),
        ("user", "Why\n"),
        ("assistant", "So."),
        ("user", "{{ 1 }} & <x>?"),
        ("assistant", "That."),
    )
    for role, text in (turn,)
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds \u00e9 <numbers>.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
#: As a tokenizer's own files name them, in the forms that are found.
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "<end>"},
    "unk_token": None,
    "extra_special_tokens": {"image_token": "<image>"},
}
LEGACY = {"pad_token": {"content": "<pad>", "lstrip": False}, "unk_token": "<unk>"}


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes(tiny.tokenizer().serialised)
    # The ids are of other tokens, as in many folders.
    config = {"model_type": "llama", "bos_token_id": 3, "eos_token_id": 4}
    for name, record in (
        ("tokenizer_config", SETTINGS),
        ("special_tokens_map", LEGACY),
        ("config", config),
    ):
        (folder / f"{name}.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module", name="transformers")
def _transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(name="no_process")
def _no_process(monkeypatch):
    """The template's program is called: 150 processes start in 20 seconds."""

    def run(command, *, input, **_):
        assert command[-1] == template_program.__file__
        output = io.StringIO()
        with contextlib.redirect_stdout(output), monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(input))
            patch.setattr(template_program.resource, "setrlimit", lambda *_: None)
            template_program.main()
        return subprocess.CompletedProcess(command, 0, output.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_the_texts_of_transformers(name, folder, transformers):
    there = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = read_text_interface(folder, 99).template_tokens()
    source = TEMPLATES[name]
    rendered = 0
    for tools in (None, [TOOL], [TOOL, TOOL]):
        for head in ([], [SYSTEM]):
            cases = [([*head, *TURNS[:count]], count % 2 == 1) for count in range(1, 7)]
            try:
                expected = [
                    there.apply_chat_template(
                        messages,
                        tools=tools,
                        chat_template=source,
                        add_generation_prompt=prompts,
                        tokenize=False,
                    )
                    for messages, prompts in cases
                ]
            except Exception as error:
                # Gemma 2 refuses a system text, here too.
                with pytest.raises(ValueError, match=str(error)):
                    render(source, cases, tokens, tools)
                continue
            assert render(source, cases, tokens, tools) == expected
            rendered += len(cases)
    assert rendered >= 18


def test_template_that_counts_sees_all_turns():
    form = ChatFormat(TEMPLATES["rare"], {"eos_token": "<end>", "bos_token": "<s>"})
    prompt = form.prompt("And?", [("a", "b"), ("c", "d")])
    assert "Round 3:<user>And?<end>" in prompt and "Round 2" not in prompt


def test_question_may_hold_any_text():
    form = ChatFormat(TEMPLATES["chatml"])
    for text in ("{{ 7 }}", "answer", "question", "<|im_end|>"):
        turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert form.prompt(text) == turn == form.prompt(text, [(text, text)])


@pytest.mark.parametrize(
    "source,reason",
    [
        ("{{ foo('x') }}", "'foo' is undefined"),
        ("{{ 'a' | foo }}", "No filter named 'foo'"),
        ("{{ raise_exception('No.\nNo') }}", "No. No"),
        ("{{ '%2000000000d' % 1 }}", "too much memory"),
        ("{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "more than 1,0"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "recursion"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set a = namespace(__class__=1) %}", "not safe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_failure_of_a_template_is_one_line(source, reason):
    with pytest.raises(ValueError, match="cannot be used: ") as caught:
        render(source, [([], True)], {})
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_endless_template_is_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 1)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ValueError, match="more than 1 seconds of a CPU"):
        render(loops, [([], True)], {})
    monkeypatch.setattr(chat_template, "WALL_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"more than 0.01 seconds"):
        render(loops, [([], True)], {})
