"""A fit that is killed again and again, in processes of its own.

Started as ``python -m tests.interrupted_fit folder kills kind ...``: children are forked, killed at
random moments, and started again until that many were killed and each kind of fit has ended; what
each ended with goes to a file.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace_debias import Laplace
from laplace_debias.storage.fingerprints import tensors_hash
from tests import cases

PLAIN = ("single", "two-batch")
DRAWN = {
    "crossfit": {"n_folds": 3, "n_curvature": 100},
    "crossfit-inputs": {"n_passes": 135, "fisher": "exact", "n_input": 90},
    "auto": {"tolerance": 0.01},
    "auto-passes": {"tolerance": None, "n_passes": 150, "n_pool": 100},
    "crossfit-drawn": {"sampling": "curvature", "n_curvature": 40, "n_input": 60, "n_folds": 3},
}
"""Options of methods with folds or draws, by the kind of fit."""


class Slow(TensorDataset):
    """Data that take their time, so that there is some to be killed in."""

    def __getitem__(self, index):
        """Return a datum, after a while."""
        time.sleep(0.0005)
        return super().__getitem__(index)


def fit(
    kind, path=None, seconds=0.0, seed=1, model=None, data_seed=0, memory_budget=None, **options
):
    """A fit with random numbers of every origin: shuffled loaders and sampled vectors."""
    torch.manual_seed(5)  # of the first, unseeded loader
    X, y = cases.MLP.data(240, data_seed)
    loader = DataLoader(Slow(X[:120], y[:120]), 8, shuffle=True)
    other = DataLoader(
        Slow(X[120:], y[120:]), 8, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    debias = kind.split("-")[0] if kind in DRAWN else kind
    given = {} if debias == "auto" else {"fisher": "mc"}
    given |= {"generator": torch.Generator().manual_seed(seed)}
    la = Laplace(
        model or cases.MLP.model(), "classification", "all", "kron", debias=debias, verify=False,
        **{**given, **DRAWN.get(kind, {}), **options},
    )  # fmt: skip
    second = other if kind == "two-batch" else None
    kept = {"checkpoint": path, "checkpoint_seconds": seconds, "memory_budget": memory_budget}
    la.fit(loader, curvature_loader=second, n_data=500, **kept)
    tensors = [
        t for block in (*la._fitted.Q, *la._fitted.lam, *la._fitted.lam_tilde) for t in block
    ]
    passes = (la.fit_cost.forward, la.fit_cost.backward)
    after = int(torch.randint(2**31, (), generator=la.generator))
    return {"bits": tensors_hash([*tensors, la.loss]), "passes": passes, "after": after}


def child(kind, folder, number):
    """One life of a fit: it ends with a file, or is killed."""
    result = fit(kind, folder / f"{kind}.checkpoint")
    (folder / f"{kind}-{number}.json").write_text(json.dumps(result))
    os._exit(0)


def lived(pid, checkpoint, chance):
    """Kill a process at a random moment after it has written something; how it ended."""
    written = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    wanted, seen = chance.choice([0, 1, 1, 3, 5]), 0  # how often, before the moment comes
    while seen < wanted:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        now = checkpoint.stat().st_mtime_ns if checkpoint.exists() else written
        seen, written = seen + (now != written), now
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def main(folder, kills, kinds):
    """Kill and start again."""
    torch.set_num_threads(1)
    chance, killed, ended, lives = random.Random(0), 0, 0, 0
    resumed = 0
    status = 1
    while killed < kills or ended < len(kinds) or status != 0:
        kind = kinds[ended % len(kinds)]
        resumed += (folder / f"{kind}.checkpoint").exists()
        lives += 1
        pid = os.fork()
        if pid == 0:
            child(kind, folder, ended)
        if killed < kills:
            status = lived(pid, folder / f"{kind}.checkpoint", chance)
        else:
            _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:
            assert os.WEXITSTATUS(status) == 0
            ended += 1
    (folder / "lives.json").write_text(json.dumps([lives, killed, ended, resumed]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
