"""Needles in haystacks: RULER's sentences, depths and lengths."""

import re

import numpy as np
import pytest

from memjax.data import (
    NEEDLE_TASKS,
    NeedleTask,
    load_tokenizer,
    needle_batch,
    needle_sample,
)

BYTES = load_tokenizer("bytes")
ESSAY = (
    "It was a dull day. Nobody came! Was that so bad? Mr. Hale said nothing, as "
    'he always did. "Never mind," said his aunt. The rain went on until the evening.'
).split()
ANSWERS = {
    "S-NIAH-PK": r"\d{7}",
    "S-NIAH-N": r"\d{7}",
    "S-NIAH-W": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}


def draw(name, seed=0, length=1200, **options):
    task = NEEDLE_TASKS[name]
    return needle_sample([seed], task, length, BYTES, ESSAY, **options)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_prompt_equals_rulers(name):
    kind = NEEDLE_TASKS[name].kind
    for seed in range(20):
        sample = draw(name, seed)
        assert re.fullmatch(ANSWERS[name], sample.answer)
        needle = re.search(
            rf"One of the special magic {kind}s for ([a-z]+-[a-z]+) is: (\S+)\.",
            sample.prompt,
        )
        assert needle and needle[2] == sample.answer
        assert sample.prompt.count(sample.answer) == 1
        assert sample.prompt.startswith(
            f"A special magic {kind} is hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {kind} afterwards.\n"
        )
        assert sample.prompt.endswith(
            f"\nWhat is the special magic {kind} for {needle[1]} mentioned in the "
            f"provided text? The special magic {kind} for {needle[1]} mentioned in the "
            "provided text is"
        )


def test_haystacks_are_noise_or_the_essay():
    noise = draw("S-NIAH-PK").prompt.split("\n")[1:-1]
    rest = [line for line in noise if not line.startswith("One of")]
    assert len(rest) == len(noise) - 1 > 3
    assert set(rest) == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and "
        "back again."
    }
    essay = draw("S-NIAH-N").prompt.split("\n")[1]
    essay = re.sub(r" ?One of the special magic numbers for \S+ is: \d+\.", "", essay)
    words = essay.split()
    assert words == [ESSAY[i % len(ESSAY)] for i in range(len(words))]
    assert len(words) > 2 * len(ESSAY)
    shifted = {
        draw("S-NIAH-N", s, start="random").prompt.split()[27:31][0] for s in range(9)
    }
    assert len(shifted) > 3


def test_needles_are_between_sentences_at_every_depth():
    places, before = [], set()
    for seed in range(200):
        context = draw("S-NIAH-N", seed, length=1800).prompt.split("\n")[1]
        at = context.index("One of the special")
        places.append(at / len(context))
        # At depth 1 it follows the last sentence, which may be cut.
        if re.search(r"is: \d{7}\.$", context) is None:
            before.add(context[:at].strip()[-1:])
    assert before <= {".", "!", "?", '"', ""} and len(before) >= 4
    assert np.histogram(places, bins=4, range=(0, 1))[0].min() > 25
    lines = [draw("S-NIAH-PK", seed).prompt.split("\n")[1:-1] for seed in range(200)]
    index = [[line[:6] for line in part].index("One of") for part in lines]
    assert set(index) == set(range(len(lines[0]) - 1))


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_needle_is_at_the_given_depth(name):
    for depth in (0, 50, 100):
        first, *_, last = (draw(name, seed, depth=depth) for seed in range(3))
        # Other draws, as the answer, do not change with the depth.
        assert (first.answer, last.answer) == (draw(name).answer, draw(name, 2).answer)
        context = "\n".join(last.prompt.split("\n")[1:-1])
        at = context.index("One of the special") / len(context)
        assert abs(at - {0: 0, 50: 0.45, 100: 0.9}[depth]) < 0.1


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe4k"])
def test_prompt_nearly_fills_the_length(tokenizer):
    chosen = load_tokenizer(tokenizer)
    for name, task in NEEDLE_TASKS.items():
        for length in (900, 1100):
            sample = needle_sample([1], task, length, chosen, ESSAY)
            used = len(chosen.encode(sample.prompt))
            used += len(chosen.encode(f" {sample.answer}"))
            assert length - 100 < used <= length, (name, used)


def test_only_answers_of_needles_are_scored():
    batch = needle_batch([3], 4, NEEDLE_TASKS["S-NIAH-W"], 900, BYTES, ESSAY)
    assert batch.tokens.shape == (4, 900) and batch.reset.all()
    for row in range(4):
        sample = needle_sample([3, row], NEEDLE_TASKS["S-NIAH-W"], 900, BYTES, ESSAY)
        asked = batch.mask[row] == 1
        assert (
            BYTES.decode(np.asarray(batch.targets[row])[asked]) == f" {sample.answer}"
        )
        text = BYTES.decode(np.asarray(batch.tokens[row]))
        assert text.startswith(f"{sample.prompt} {sample.answer}")
    again = needle_batch([3], 4, NEEDLE_TASKS["S-NIAH-W"], 900, BYTES, ESSAY)
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    assert len({row.tobytes() for row in batch.tokens}) == 4


def test_samples_never_change():
    """A result names its seed: the same sample, whatever numpy is installed."""
    sample = draw("S-NIAH-PK", seed=7)
    assert sample.answer == "2826786"
    word = needle_sample([7], NeedleTask("noise", "word"), 1000, BYTES)
    assert word.answer == "gentle-arrow"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw("S-NIAH-PK", length=300), "length leaves 292 tokens"),
        (
            lambda: needle_sample([0], NEEDLE_TASKS["S-NIAH-N"], 900, BYTES),
            "essay is empty",
        ),
        (
            lambda: needle_batch([0], 0, NEEDLE_TASKS["S-NIAH-PK"], 900, BYTES),
            "batch must be at least 1, got 0",
        ),
        (lambda: draw("S-NIAH-PK", depth=101), r"depth must be in \[0, 100\], got 101"),
        (
            lambda: needle_sample([0], NeedleTask("noise", "name"), 900, BYTES),  # pyright: ignore
            "kind='name'",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
