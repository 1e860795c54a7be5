"""How fits scale over processes of one thread each, and what the network carries.

Strong scaling: the same 2 x M data, shared out to 1 and to 2 processes. Weak scaling: 2 x M data
for each process. Seconds are CPU seconds of the busiest process: other work on the machine does
not count (nor does waiting). Bytes are those of tensors that rank 0 summed or passed on. The second
table is on paper: what a ResNet-50's factors weigh over links of some speeds.

    python -m examples.benchmarks.scaling
    python -m examples.benchmarks.scaling --model convnet-1-8 --budget 8    # a few seconds
"""

# %% Imports
from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from examples.large_networks import resnet50
from examples.networks import make_model
from laplace_debias import Laplace, check_model
from laplace_debias.data.processes import processes

GBIT = 1e9 / 8
LINKS = {"1 Gbit/s": GBIT, "10 Gbit/s": 10 * GBIT, "100 Gbit/s": 100 * GBIT}


# %% What each process does
def share(model: str, n: int, rank: int, size: int, weak: bool) -> dict[str, float]:
    """Fit on this process's share of two mini-batches; CPU and clock seconds, and bytes."""
    torch.manual_seed(0)
    network = make_model(model).eval()
    total = n * size if weak else n
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        X = torch.randn(total, 3, 32, 32, generator=generator)
        y = torch.randint(10, (total,), generator=generator)
        batches.append((X[rank::size], y[rank::size]))
    la = Laplace(network, "classification", "all", "kron", debias=True)
    group = processes()
    assert group is not None
    dist.barrier()
    carried, cpu, clock = group.carried, time.process_time(), time.perf_counter()
    la.fit(batches, n_data=50_000)
    return {
        "cpu": time.process_time() - cpu,
        "clock": time.perf_counter() - clock,
        "bytes": group.carried - carried,
        "trace": float(sum(lam.sum() for block in la.H.eigenvalues for lam in block)),
    }


def work(args: argparse.Namespace) -> None:
    """What ``--rank`` does: measure, and write to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.folder}/store",
        rank=args.rank,
        world_size=args.size,
        timeout=timedelta(minutes=10),
    )
    found = {
        kind: share(args.model, args.budget, args.rank, args.size, kind == "weak")
        for kind in ("strong", "weak")
    }
    (args.folder / f"{args.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# %% Start them, and put their numbers together
def measured(model: str, budget: int, size: int) -> dict[str, dict[str, float]]:
    """The busiest process of each kind, and the bytes of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "examples.benchmarks.scaling"]
        command += ["--model", model, "--budget", str(budget), "--size", str(size)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*command, "--folder", folder, "--rank", str(rank)], env=env)
            for rank in range(size)
        ]
        if any(process.wait() for process in running):
            raise RuntimeError(f"A process of {size} failed.")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        kind: {
            "cpu": max(each[kind]["cpu"] for each in ranks),
            "clock": max(each[kind]["clock"] for each in ranks),
            "bytes": ranks[0][kind]["bytes"],
            "trace": ranks[0][kind]["trace"],
        }
        for kind in ("strong", "weak")
    }


def on_paper() -> list[dict[str, object]]:
    """Seconds for a ResNet-50's factors over some links, for 8 and 64 workers.

    Factors are reduced to rank 0 and broadcast, bases are broadcast: each along a tree of
    ``log2(workers)`` levels, one after the other in the worst case.
    """
    torch.manual_seed(0)
    check = check_model(resnet50().eval(), torch.zeros(1, 3, 64, 64), "classification")
    S = sum(layer.factor_bytes for layer in check.layers)
    rows: list[dict[str, object]] = []
    for workers in (8, 64):
        carried = 3 * S * math.log2(workers)
        seconds = {link: carried / speed for link, speed in LINKS.items()}
        rows.append({"workers": workers, "factors": S, "carried": carried, **seconds})
    return rows


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Print both tables and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    parser.add_argument("--budget", type=int, default=32, help="M")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_scaling.json"))
    parser.add_argument("--size", type=int, default=2, help="number of processes")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        work(args)
        return {}
    one, several = (measured(args.model, args.budget, size) for size in (1, args.size))
    result: dict[str, object] = {"model": args.model, "budget": args.budget}
    for kind in ("strong", "weak"):
        ratio = one[kind]["cpu"] / several[kind]["cpu"]
        result[kind] = {"1": one[kind], str(args.size): several[kind], "ratio": ratio}
        print(
            f"{kind:<8} 1 process {one[kind]['cpu']:8.2f} s, {args.size} processes "
            f"{several[kind]['cpu']:8.2f} s each, ratio {ratio:.2f}; "
            f"{several[kind]['bytes'] / 2**20:,.1f} MiB carried"
        )
    result["on paper"] = on_paper()
    for row in on_paper():
        times = ", ".join(f"{row[link]:.1f} s at {link}" for link in LINKS)
        print(
            f"ResNet-50, {row['workers']} workers: factors of {row['factors'] / 2**20:,.0f} MiB, "
            f"{row['carried'] / 2**30:,.1f} GiB through the busiest link: {times}"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
