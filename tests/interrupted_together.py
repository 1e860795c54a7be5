"""A fit of two processes that are killed again and again, one of them or both.

Started as ``python -m tests.interrupted_together folder kills kind ...``: pairs of children are
forked, killed at random moments, and started again until that many lives were ended so and the fit
is complete; what each process ended with goes to a file. Without any kill first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from laplace_debias import Laplace
from laplace_debias.storage.fingerprints import tensors_hash
from tests import cases
from tests.interrupted_fit import Slow

SHARES = ((0, 30), (30, 48))
"""Rows of the first loader of each process; those of the second follow."""


def fit(kind, rank, path):
    """This process's part, with vectors that are sampled, and a shuffled loader."""
    X, y = cases.MLP.data(96, 0)
    start, stop = SHARES[rank]
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(Slow(X[start:stop], y[start:stop]), 6, shuffle=True, generator=generator)
    other = DataLoader(Slow(X[48 + start : 48 + stop], y[48 + start : 48 + stop]), 6)
    la = Laplace(
        cases.MLP.model(), "classification", "all", "kron", debias=kind, fisher="mc", verify=False,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    second = other if kind == "two-batch" else None
    la.fit(loader, curvature_loader=second, n_data=500, checkpoint=path, checkpoint_seconds=0.0)
    parts = (*la._fitted.Q, *la._fitted.lam, *la._fitted.lam_tilde)
    bits = tensors_hash([*(t for block in parts for t in block), la.loss])
    return {"bits": bits, "passes": [la.fit_cost.forward, la.fit_cost.backward]}


def child(kind, folder, rank, life):
    """One life of a process: it ends with a file, is killed, or stops because the other was."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{life}", rank=rank, world_size=2,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    (folder / f"begun-{life}-{rank}").touch()
    try:
        found = fit(kind, rank, folder / "fit")
    except RuntimeError as error:
        os._exit(3 if "Expected" in str(error) else 1)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def main(folder, kills, kind):
    """Kill and start again."""
    torch.set_num_threads(1)
    chance, killed, lives, resumed = random.Random(0), 0, 0, []
    codes = [1]
    while any(codes):
        resumed.append(len(list(folder.glob("fit.rank?"))))
        pids = []
        for rank in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                child(kind, folder, rank, lives)
        if killed < kills:
            _wait_for_files(folder, lives, chance.choice([0, 1, 3, 6, 12]))
            time.sleep(chance.uniform(0.0, 0.02))
            victims = chance.choice([pids[:1], pids[1:], pids])
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        lives += 1
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        killed += any(map(os.WIFSIGNALED, codes))
        assert all(os.WIFSIGNALED(c) or os.WEXITSTATUS(c) in (0, 3) for c in codes), codes
        if not any(codes) and killed < kills:  # ended before the kill came: once more
            codes = [1]
    (folder / "lives.json").write_text(json.dumps([lives, killed, resumed]))


def _wait_for_files(folder, life, wanted):
    """Until the group is there and so many files were written, or nothing was for a while."""
    while len(list(folder.glob(f"begun-{life}-?"))) < 2:
        time.sleep(0.001)
    seen, last, end = 0, None, time.monotonic() + 1.0
    while seen < wanted and time.monotonic() < end:
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("fit.rank?")}
        if now != last:
            seen, last, end = seen + 1, now, time.monotonic() + 1.0
        time.sleep(0.001)


if __name__ == "__main__":
    for name in sys.argv[3:]:
        for count in (0, int(sys.argv[2])):
            place = Path(sys.argv[1]) / f"{name}-{count}"
            place.mkdir()
            main(place, count, name)
