"""No path assumes the CPU: tensors leave their device only where the list below says why.

On a GPU each of ``.cpu()``, ``.numpy()``, ``.item()`` and ``.tolist()`` waits for the device. Fits,
predictions and sweeps run here under a mode that notes the function of the library that asked.
"""

import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace, sweep_prior_precision

WAITING = {getattr(torch.Tensor, name): name for name in ("cpu", "numpy", "item", "tolist")}

# Function of the library -> why it may wait for the device.
ALLOWED = {
    "data/pool.py:_fetch": "positions in a map-style data set, which Python reads",
    "data/pool.py:segments": "positions in a map-style data set, before the first pass",
    "debias/certificate.py:estimated_distance": "once per round, a few probes",
    "debias/sampling.py:distinct": "positions in a map-style data set, once per fit",
    "debias/drawn.py:add": "which data were drawn, once per round",
    "debias/drawn_rows.py:add": "which data were drawn, once per round",
    "debias/folds.py:isotonic": "SciPy's isotonic regression, once per factor",
    "debias/pairs.py:pairs_of_data": "which draws share a datum, once per round",
    "debias/rounds.py:_fetched": "which draws share a datum, once per round",
    "debias/rounds.py:_draw": "which data to draw next, once per round",
    "debias/rounds.py:_left": "which data are left, once per round",
    "debias/spectrum.py:eigh_float64": "LAPACK, for matrices that are on the CPU anyway",
    "predictive/row_check.py:misplaced_rows": "two data, once per model",
}


class Waits(TorchFunctionMode):
    """Notes the library's functions that copy a tensor to the host."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Note the caller of ``func`` if it waits, and let it run."""
        if func in WAITING:
            frame = sys._getframe(1)
            reads_data = "utils/data/" in frame.f_code.co_filename  # the user's own loader
            while frame is not None and "/laplace_debias/" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and not reads_data:
                file = frame.f_code.co_filename.split("/laplace_debias/")[-1]
                self.found.add(f"{file}:{frame.f_code.co_name} {WAITING[func]}")
        return func(*args, **(kwargs or {}))


def test_the_mode_sees_who_waits(tmp_path):
    folder = tmp_path / "laplace_debias"
    folder.mkdir()
    (folder / "slow.py").write_text("def waits(t):\n    return t.sum().item()\n")
    scope = {}
    exec(compile((folder / "slow.py").read_text(), str(folder / "slow.py"), "exec"), scope)
    with Waits() as waits:
        scope["waits"](torch.ones(2))
        torch.ones(2).tolist()  # not the library's
    assert waits.found == {"slow.py:waits item"}


def problem():
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(48, 1, 6, 6, generator=generator), torch.arange(48) % 3
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return model, DataLoader(TensorDataset(X, y), 16), X, y


METHODS = {
    "single": {"debias": "single"},
    "two-batch": {"debias": True},
    "crossfit": {"debias": "crossfit"},
    "curvature sampling": {"debias": "crossfit", "sampling": "curvature", "n_curvature": 16},
    "auto": {"debias": "auto", "tolerance": None, "n_passes": 40},
}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_waits_for_the_device_but_what_may(method):
    model, loader, X, y = problem()
    with Waits() as waits:
        la = Laplace(model, "classification", "all", "kron", **METHODS[method])
        la.fit(loader)
        la(X[:4])
        la(X[:4], link_approx="mc", n_samples=5)
        sweep_prior_precision(la, [(X, y)], prior_precisions=[0.1, 1.0])
    assert not {found for found in waits.found if found.split()[0] not in ALLOWED}
