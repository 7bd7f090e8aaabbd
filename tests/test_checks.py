"""Wrong arguments are named, with what is allowed."""

import pytest

from memjax.checks import check_positive, check_sizes, require_known


def test_the_first_wrong_size_is_named():
    check_sizes(heads=1, slots=7)
    with pytest.raises(ValueError, match="^slots must be at least 1, got 0$"):
        check_sizes(heads=1, slots=0, width=-1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_what_is_not_above_zero_is_refused(value):
    check_positive(rate=1e-9)
    with pytest.raises(ValueError, match=f"^rate must be positive, got {value}$"):
        check_positive(rate=value)


def test_an_unknown_choice_is_answered_with_the_nearest():
    require_known("rule", None, (None, "uniform"))
    with pytest.raises(
        ValueError, match=r"got 'uniforn' \(did you mean 'uniform'\?\)$"
    ):
        require_known("rule", "uniforn", (None, "uniform"))
    with pytest.raises(ValueError, match=r"one of \('a', 'b'\), got None$"):
        require_known("kind", None, ("a", "b"))
