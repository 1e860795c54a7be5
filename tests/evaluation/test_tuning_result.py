"""What a tuning result says about itself."""

import math

import pytest

from laplace_debias.evaluation.tuning_result import LayerwiseTrial, TuningResult

VALUES = ((0.5, 0.6, 0.7), (math.nan, 0.3, 0.4), (0.35, 0.5, 0.6))

BETTER = "the plain network is better than any of these posteriors"


def _result(values=VALUES, plain=(0.4, 0.6, 0.9), better=False, **kwargs):
    return TuningResult(
        "nll", better, (0.1, 1.0, 10.0), (0.5, 1.0, 2.0), values, plain, 8, "probit", **kwargs
    )


def test_the_best_pair_is_never_nan():
    result = _result()
    assert result.best_index == (1, 1) and result.best == 0.3
    assert _result(better=True).best_index == (0, 2)
    with pytest.raises(ValueError, match="NaN for 'nll'"):
        _ = _result(((math.nan,) * 3,) * 3).best_index


def test_a_trial_is_taken_only_if_it_is_confirmed():
    kept = LayerwiseTrial((2.0, 3.0), (0.3, 0.2), (0.3, 0.2), 0.05, 8)
    lost = LayerwiseTrial((2.0, 3.0), (0.3, 0.1), (0.3, 0.29), 0.05, 8)
    assert _result(layerwise=kept).prior_precision.tolist() == [2.0, 3.0]
    assert _result().with_trial(lost).prior_precision.item() == 1.0


@pytest.mark.parametrize(
    ("values", "plain", "expected"),
    [
        (VALUES, (0.1, 0.6, 0.9), []),
        (((0.1, 0.2, 0.3), *VALUES[1:]), (0.0, 0.6, 0.9), ["smaller values", "temperature 0.5"]),
        ((*VALUES[:2], (0.9, 0.1, 0.2)), (0.4, 0.6, 0.9), ["extend the grid to larger"]),
        (
            (*VALUES[:2], (0.9, 0.1, 0.2)),
            (0.05, 0.6, 0.9),
            [BETTER + "; consider"],
        ),
        (
            (*VALUES[:2], (0.9, 0.1, 0.2)),
            (0.4, 0.6, 0.05),
            [BETTER + "; its logits"],
        ),
    ],
)
def test_warnings(values, plain, expected):
    texts = _result(values, plain).warnings()
    assert len(texts) == len(expected)
    for text, part in zip(texts, expected, strict=True):
        assert part in text
    assert all(
        ("plain network is better" in t) is (min(plain) < 0.1) for t in texts[:1] if plain[0] != 0.0
    )


def test_sweep_table_and_rows():
    result = _result()
    assert result.sweep().values["nll"] == (0.6, 0.3, 0.5)
    assert result.sweep(2.0).prior_precisions.tolist() == [0.1, 1.0, 10.0]
    with pytest.raises(ValueError, match="Expected a temperature of the grid"):
        result.sweep(3.0)
    assert "T=0.5" in result.table() and "plain" in result.table()
    assert "T=1" in str(result) and "T=0.5" not in str(result)
    head, rows = result.rows()
    assert head == ["prior_precision", "logit_temperature", "nll"] and len(rows) == 12
    assert rows[4] == [1.0, 1.0, 0.3] and rows[-1] == [None, 2.0, 0.9]


@pytest.mark.parametrize(("last", "words"), [(0.3001, "better than any"), (0.2999, "as good as")])
def test_a_flat_end_of_a_regression_is_told_as_such(last, words):
    values = ((0.5,), (0.31,), (last,))
    result = TuningResult("nll", False, (0.1, 1.0, 10.0), (1.0,), values, (0.3,), 8, None)
    (text,) = result.warnings()
    assert words in text and "on such data. Elsewhere" in text and "extend" not in text
    sharp = TuningResult("nll", False, (0.1, 1.0), (1.0,), ((0.5,), (0.2,)), (0.3,), 8, None)
    assert "extend the grid to larger" in sharp.warnings()[0]
