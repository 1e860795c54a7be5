"""Keys of data: the same for the same datum, wherever it is met."""

import torch

from laplace_debias.data.datum_keys import datum_keys


def test_keys_follow_the_datum():
    X = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    keys = datum_keys(X, 6, 7)
    order = torch.tensor([3, 0, 5])
    assert datum_keys(X[order], 3, 7) == [keys[i] for i in order]
    assert len(set(keys)) == 6 and all(0 <= key < 2**63 for key in keys)
    assert not set(keys) & set(datum_keys(X, 6, 8))


def test_all_entries_of_a_mapping_count_that_have_a_row_per_datum():
    X = {"ids": torch.tensor([[1], [1]]), "mask": torch.tensor([0, 1]), "scale": 2.0}
    one, two = datum_keys(X, 2, 0)
    assert one != two
    assert datum_keys({**X, "scale": 3.0}, 2, 0) == [one, two]
