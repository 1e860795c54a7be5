"""Which predictions count."""

import torch

from laplace_debias.evaluation.counted import counted_rows, ignore_index_of


def test_data_count_one_by_one():
    values, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    rows, found = counted_rows(values, labels)
    assert rows is values and torch.equal(found, labels)  # -100 is for the check to refuse


def test_positions_that_count_in_order():
    values = torch.arange(24.0).reshape(2, 2, 2, 3)
    labels = torch.tensor([[[0, 7], [1, 2]], [[7, 7], [2, 0]]])
    rows, found = counted_rows(values, labels, ignore_index=7)
    assert found.tolist() == [0, 1, 2, 2, 0]
    assert torch.equal(rows, values.reshape(-1, 3)[[0, 2, 3, 6, 7]])
    many, _ = counted_rows(torch.stack([values, -values]), labels, 7, leading=1)
    assert torch.equal(many[1], -rows)


def test_soft_labels_of_positions_all_count():
    values, labels = torch.randn(2, 5, 3), torch.full((2, 5, 3), 1 / 3)
    rows, found = counted_rows(values, labels)
    assert rows.shape == found.shape == (10, 3)


def test_ignore_index_of_a_posterior():
    class Posterior:
        class objective:  # noqa: N801
            ignore_index = 255

    assert ignore_index_of(Posterior()) == 255 and ignore_index_of(None) == -100
