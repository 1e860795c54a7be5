"""Finished pieces of long runs, what they are recognised by, and results as files."""

from laplace_debias.storage.atomic import write_atomically
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.data_digest import data_hash
from laplace_debias.storage.fingerprints import fingerprint, loss_hash, model_hash, tensors_hash
from laplace_debias.storage.results import SavedResult

__all__ = [
    "CellStore",
    "SavedResult",
    "data_hash",
    "fingerprint",
    "loss_hash",
    "model_hash",
    "tensors_hash",
    "write_atomically",
]
