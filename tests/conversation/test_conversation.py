"""Texts and turns are in the state, in the folder, and for another process."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.conversation import Conversation, MemoryFolder, conversation
from memjax.conversation.backends import Drawn, StateBackend
from memjax.data import load_tokenizer
from memjax.data.documents.tokenizer import ByteTokenizer
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.models import ReReadWindow, Sampling, add_mplus, generate
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from memjax.models.mplus.config import MPlusConfig
from tests import tiny

MEMORY = MPlusConfig(
    num_memory_tokens=2,
    pool_size=8,
    chunk_size=16,
    min_chunk_size=1,
    num_retrieved=2,
    store_size=64,
    key_dim=2,
    rank=2,
)
TEXT = TextInterface(load_tokenizer("bytes"))
DRAWN = Sampling(1.0)


def llama(capacity: int = 1024) -> Any:
    attention = AttentionConfig(16, 4, 2, 4, capacity=capacity, initial_slots=8)
    return tiny.llama(vocab_size=256, mechanisms=(attention,), num_layers=1)


# Functions: nothing is computed before a test needs it.
MODELS = {
    "attention": llama,
    "mplus": lambda: tiny.drawn(
        lambda: add_mplus(llama(), MEMORY, key=jax.random.key(1))
    ),
}
SLOW = [
    name if name == "attention" else pytest.param(name, marks=pytest.mark.slow)
    for name in MODELS
]


class Compiled:
    """Counts the programs that are compiled meanwhile."""

    def __enter__(self) -> "Compiled":
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._event)

    def _event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += "backend_compile" in event


def same_bits(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", SLOW)
def test_a_reopened_conversation_equals_one_never_closed(name, tmp_path):
    """Bit for bit, and a second turn compiles nothing."""
    model = MODELS[name]()
    options: Any = dict(limit=6, sampling=DRAWN)
    here = Conversation(model, TEXT)
    assert here.inject("A long and told text.", name="book") == 21
    first = here.chat("Who?", **options)
    with MemoryFolder(tmp_path / "memory") as folder:
        there = Conversation(model, TEXT, folder)
        there.inject("A long and told text.", name="book")
        assert there.chat("Who?", **options) == first
        there = Conversation(model, TEXT, folder)
    with Compiled() as compiled:
        second = here.chat("And why?", **options)
    assert compiled.count == 0
    assert there.query("And why?", **options) == second
    assert there.tokens == 21 + len("\n\nQuestion: Who?\nAnswer:") + first.tokens
    with MemoryFolder(tmp_path / "memory") as folder:
        there = Conversation(model, TEXT, folder)
        assert there.chat("And why?", **options) == second
        again = Conversation(model, TEXT, folder)
    assert again.record == there.record and again.entries[1:] == here.entries[1:]
    same_bits(again.state, there.state)
    same_bits(again.state, here.state)


def test_undo_restores_the_memory_before_a_turn_a_text_and_forget(tmp_path):
    with MemoryFolder(tmp_path / "memory") as folder:
        talk = Conversation(llama(), TEXT, folder)
        talk.inject("A told text.", name="book")
        told, first = talk.record, talk.state
        talk.chat("Who?", limit=3)
        talk.undo()
        assert talk.record == told and talk.state is first
        with pytest.raises(ValueError, match="takes back only the last"):
            talk.undo()
        talk.forget()
        assert (talk.tokens, talk.room) == (0, 1024)
        talk.undo()
        # The folder has what is restored, too.
        saved = Conversation(llama(), TEXT, folder)
        assert saved.record == told
        same_bits(saved.state, first)


def test_system_message_comes_before_the_first_question():
    talk, plain = Conversation(llama(), TEXT), Conversation(llama(), TEXT)
    talk.set_system("Be brief.")
    for each in (talk, plain):
        each.chat("Who?", limit=2)
    assert talk.tokens - plain.tokens == len("Be brief.\n\n")
    assert talk.record.system == "Be brief."
    with pytest.raises(ValueError, match="before the first question"):
        talk.set_system("Be long.")


def test_texts_are_known_by_their_content():
    talk = Conversation(llama(), TEXT)
    talk.inject("A told text.", name="book")
    assert talk.record.name_of("A told text.") == "book"
    assert talk.record.name_of("Another.") is None


def test_lost_tokens_are_those_that_have_left_the_windows():
    window = SlidingWindowConfig(16, 4, 2, 4, window=8)
    mixed = (window, AttentionConfig(16, 4, 2, 4, capacity=64))
    model = tiny.llama(vocab_size=256, mechanisms=(window,), num_layers=2)
    assert tiny.llama(mechanisms=mixed, num_layers=2).reach is None
    assert ReReadWindow(llama(), reread=5, segment=4).reach == 9
    talk = Conversation(model, TEXT)
    talk.inject("Short.")
    assert (talk.room, talk.lost) == (None, 0)
    talk.inject("Longer.")
    assert talk.lost == talk.tokens - 8 > 0


def test_longer_turns_compile_nothing():
    """The cache of an empty memory is enlarged for several turns."""
    talk = Conversation(llama(), TEXT)
    talk.chat("Hello?", limit=100)
    with Compiled() as compiled:
        talk.chat("And a question that is longer?", limit=100)
        talk.query("Why?", limit=100)
    assert compiled.count == 0


def test_state_after_a_turn_has_read_prompt_and_answer():
    model = llama()
    talk = Conversation(model, TEXT)
    talk.inject("Told.")
    asked = talk.state
    answer = talk.chat("Why?", limit=5, sampling=DRAWN)
    assert answer.tokens == 5 and not answer.ended
    prompt = load_tokenizer("bytes").encode("\n\nQuestion: Why?\nAnswer:")
    read = generate(
        model, asked, prompt[None], 5, key=jax.random.key(0), sampling=DRAWN
    )
    assert int(read.state[0].length[0]) == int(talk.state[0].length[0]) == talk.tokens


def test_random_numbers_depend_on_seed_and_position(monkeypatch):
    talk, keys = Conversation(llama(), TEXT), []

    def answer(_, state, prompt, decoding, progress):
        keys.append(jax.random.key_data(decoding.key).tolist())
        return state, Drawn(prompt[:1], np.zeros(1, np.float32))

    monkeypatch.setattr(StateBackend, "answer", answer)
    monkeypatch.setattr(StateBackend, "read", lambda _, state, *rest: state)
    for seed in (0, 0, 1):
        talk.query("Who?", seed=seed)
    talk.inject("Told.")
    talk.query("Who?")
    assert keys[0] == keys[1] and len({*map(tuple, keys)}) == 3


def test_mplus_injects_a_turn_after_its_answer():
    model = MODELS["mplus"]()
    talk = Conversation(model, TEXT)
    talk.inject("x" * 40)
    before = talk.state
    talk.query("Who?", limit=3)
    assert talk.state is before and talk.tokens == 40
    talk.chat("Who?", limit=3)
    assert int(talk.state.clock[0]) > int(before.clock[0])
    # All of it is in chunks or in the open one.
    chunks = int(talk.state.clock[0]) // MEMORY.num_memory_tokens
    assert chunks * MEMORY.chunk_size + int(talk.state.length[0]) == talk.tokens


def test_interrupted_answer_is_closed_before_the_next_prompt():
    source = (
        "{% for m in messages %}{{ m.role[0] + m.content + '|' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    text = TextInterface(ByteTokenizer(), source, GenerationConfig(eos_ids=(124,)))
    talk = Conversation(llama(), text)
    counts = iter([False, True])
    answer = talk.chat("Hi", interrupted=lambda: next(counts))
    assert (answer.tokens, answer.ended) == (2, False)
    assert talk.record.pending == "|"
    talk.chat("Ho", limit=1)
    # "|uHo|a", and "uHi|a" before.
    assert [entry.tokens for entry in talk.entries] == [5, 2, 6, 1]
    talk.inject("Text", name="book")
    assert talk.entries[-1].tokens == len("|\n\nText") and not talk.record.pending


def test_answer_begins_with_given_words():
    talk, parts = Conversation(llama(), TEXT), []
    expected = talk._encode("Question: Who?\nAnswer: She")
    assert talk._prompt("Who?", "She ").tolist() == expected.tolist()
    answer = talk.query(
        "Who?", begin="She", limit=2, sampling=DRAWN, write=parts.append
    )
    assert answer.text == "".join(parts).rstrip() and parts[0] == "She"
    assert answer.tokens == 2 and talk.tokens == 0


def test_progress_counts_the_tokens_of_a_question():
    talk, seen = Conversation(llama(), TEXT), []
    question = "y" * 70
    talk.query(question, limit=1, progress=lambda *counts: seen.append(counts))
    whole = len(talk._prompt(question, ""))
    assert seen == [(64, whole), (whole, whole)]


def test_refused_input_changes_nothing():
    talk = Conversation(llama(64), TEXT)
    talk.inject("x" * 30)
    before, entries = talk.state, talk.entries
    with pytest.raises(ValueError, match="question makes 71 .* holds 30, .* 34 more"):
        talk.chat("y" * 50)
    with pytest.raises(ValueError, match=r"book\.txt makes 42 tokens to read"):
        talk.inject("x" * 40, name="book.txt")
    for wrong in ("", " \n"):
        with pytest.raises(ValueError, match="question must not be empty"):
            talk.query(wrong)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        talk.query("Who?", limit=0)
    assert talk.state is before and talk.entries == entries
    # An answer takes what room is left.
    assert talk.chat("Hi?").tokens == 64 - 30 - len("\n\nQuestion: Hi?\nAnswer:")


def test_memory_of_another_model_is_refused_by_name(tmp_path):
    model, folder = llama(), MemoryFolder(tmp_path / "memory")
    Conversation(model, TEXT, folder, name="one").inject("Told.")
    other = tiny.drawn(llama, seed=1)
    message = "with other parameters: .* memory of 'one', and not of 'two'$"
    with pytest.raises(ValueError, match=message):
        Conversation(other, TEXT, folder, name="two")
    tokenizer = ByteTokenizer(digest="other")
    with pytest.raises(ValueError, match="is of another tokenizer: the digests are"):
        Conversation(model, TextInterface(tokenizer), folder, name="one")
    with pytest.raises(ValueError, match="ids up to 299, .* vocabulary of 256"):
        Conversation(model, TextInterface(ByteTokenizer(300)), name="one")
    with pytest.raises(ValueError, match="one has no tokenizer"):
        Conversation(model, TextInterface(), name="one")


def test_turn_that_cannot_be_saved_changes_nothing(tmp_path, monkeypatch):
    folder = MemoryFolder(tmp_path / "memory")
    talk = Conversation(llama(), TEXT, folder)
    talk.inject("Told.")
    before, entries = talk.state, talk.entries

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversation, "save_memory", full)
    with pytest.raises(OSError, match="No space left"):
        talk.chat("Who?", limit=3)
    assert talk.state is before and talk.entries == entries
    monkeypatch.undo()
    talk.chat("Who?", limit=3)
    assert Conversation(llama(), TEXT, folder).record == talk.record
    assert jnp.isfinite(talk.state[0].keys).all() and os.listdir(folder.path)
