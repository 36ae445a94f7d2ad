"""The intervals against published values and against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax.tasks.intervals import (
    Z_95,
    clustered_difference_interval,
    clustered_interval,
    clustered_mean_interval,
    paired_difference_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_gives_the_published_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_solves_its_defining_equation(counts: tuple[int, int]) -> None:
    successes, n = counts
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for p in (low, high):
        if 0 < p < 1:
            assert abs(successes / n - p) == pytest.approx(Z_95 * math.sqrt(p * (1 - p) / n), rel=1e-6)


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10), (0, 0)])
def test_wilson_interval_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"need 0 ≤ successes ≤ n"):
        wilson_interval(successes, n)


def test_paired_interval_worked_by_hand() -> None:
    # 30 agree right, 12 only a, 4 only b, 4 agree wrong; n = 50.
    a = np.repeat([True, True, False, False], [30, 12, 4, 4])
    b = np.repeat([True, False, True, False], [30, 12, 4, 4])
    difference, low, high = paired_difference_interval(a, b)
    # (12.5 - 4.5)/52 ± 1.96·√(17 - 64/52)/52
    assert difference == pytest.approx(0.16)
    assert (low, high) == pytest.approx((8 / 52 - 0.14966, 8 / 52 + 0.14966), abs=1e-4)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_paired_interval_changes_sign_with_the_order(pairs: list[tuple[bool, bool]]) -> None:
    a, b = zip(*pairs, strict=True)
    difference, low, high = paired_difference_interval(a, b)
    assert -1 <= low < high <= 1
    assert paired_difference_interval(b, a) == pytest.approx((-difference, -high, -low))


def test_paired_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        ease = rng.random(100)
        a, b = rng.random(100) < 0.5 + 0.4 * ease, rng.random(100) < 0.4 + 0.4 * ease
        _, low, high = paired_difference_interval(a, b)
        covered += low <= 0.1 <= high
    assert 0.935 < covered / 2000 < 0.975


def test_paired_interval_refuses_outcomes_of_different_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired_difference_interval([True], [True, False])


# -- clusters ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_clusters_of_one_are_independent_outcomes(outcomes: list[bool]) -> None:
    single = [[one] for one in outcomes]
    assert clustered_interval(single) == wilson_interval(sum(outcomes), len(outcomes))
    others = [[not one] for one in outcomes]
    wanted = paired_difference_interval(outcomes, [not one for one in outcomes])
    assert clustered_difference_interval(single, others) == wanted


def drawn(rng: np.random.Generator, clusters: int, size: int) -> list[list[bool]]:
    """Outcomes whose probability, 0.8 in the mean, each cluster draws for itself."""
    return [(rng.random(size) < p).tolist() for p in rng.beta(1.6, 0.4, clusters)]


def test_intervals_of_clusters_cover_what_they_say() -> None:
    """In 1,000 experiments with 25 clusters of 16; taken for independent, the outcomes cover far too seldom."""
    rng = np.random.default_rng(0)
    covered, naive, differences = [], [], []
    for _ in range(1000):
        a, b = drawn(rng, 25, 16), drawn(rng, 25, 16)
        low, high = clustered_interval(a)
        covered.append(low <= 0.8 <= high)
        low, high = wilson_interval(sum(map(sum, a)), 400)
        naive.append(low <= 0.8 <= high)
        _, low, high = clustered_difference_interval(a, b)
        differences.append(low <= 0 <= high)
    assert np.mean(covered) > 0.92
    assert np.mean(differences) > 0.92
    assert np.mean(naive) < 0.7, "control"


def test_clusters_that_agree_count_as_one_outcome_each() -> None:
    low, high = clustered_interval([[True] * 16] * 15 + [[False] * 16] * 5)
    plain = wilson_interval(15, 20)  # with the normal's quantile for Student's, so a little narrower
    assert plain[0] - 0.03 < low < plain[0]
    assert plain[1] < high < plain[1] + 0.03
    assert clustered_interval([[True, False]])[0] < 0.05, "a cluster alone says little"
    assert clustered_difference_interval([[True, False]], [[True, True]]) == (-0.5, -1.0, 1.0)
    assert clustered_interval([[True, True], [True, True]])[1] == 1.0


def test_means_of_clusters_by_hand() -> None:
    """Sums 2 and 4 of two numbers each: mean 1.5, standard error 0.5; a cluster alone says nothing of others.

    Control: more clusters of the same kind narrow the interval.
    """
    mean, low, high = clustered_mean_interval([[0.5, 1.5], [2.5, 1.5]])
    assert mean == 1.5
    assert high - mean == pytest.approx(mean - low)
    narrower = clustered_mean_interval([[0.5, 1.5], [2.5, 1.5]] * 8)
    assert narrower[0] == 1.5
    assert narrower[2] - 1.5 == pytest.approx(0.5 / math.sqrt(15) * 2.131, rel=0.01)  # Student's t of 15
    assert narrower[2] < high
    assert clustered_mean_interval([[1.0, 3.0]]) == (2.0, -math.inf, math.inf)


def test_clusters_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="need the same problems"):
        clustered_difference_interval([[True, True]], [[True]])
    with pytest.raises(ValueError, match="need at least one in each"):
        clustered_interval([[True], []])
