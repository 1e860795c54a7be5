"""One posterior from the data of several processes, by PyTorch's own distributed engine.

Each process reads its share of the training set, makes the passes for it, and exchanges sums of
Kronecker factors with the others; the eigendecompositions are shared out. All processes end with
the same posterior, bit by bit, and evaluate it on their shares of the test set together.

    torchrun --standalone --nproc-per-node 2 -m examples.distributed

On GPUs the same script runs with ``--backend nccl`` and one process per device.
"""

# %% Imports
from __future__ import annotations

import argparse
import gc
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.data.processes import processes


# %% Data and a network, the same in every process
def made_data(n: int, seed: int) -> TensorDataset:
    """Three classes in a plane, on spiral arms."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    radius = torch.rand(n, generator=g)
    angle = 2.1 * y + 3 * radius + 0.3 * torch.randn(n, generator=g)
    X = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(X, y)


def trained(data: TensorDataset, steps: int) -> nn.Module:
    """A small network, trained in the usual way: gradients are averaged over processes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(data, 128, sampler=DistributedSampler(data))
    for step in range(steps):
        loader.sampler.set_epoch(step)
        for X, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), y).backward()
            optimizer.step()
    return model.eval()


# %% Fit, tune and evaluate together
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run in every process; rank 0 prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="gloo", help="gloo on CPUs, nccl on GPUs")
    parser.add_argument("--steps", type=int, default=20, help="epochs of training")
    args = parser.parse_args(argv)
    dist.init_process_group(args.backend, timeout=timedelta(minutes=5))
    train, validation, test = (made_data(n, seed) for seed, n in enumerate((2001, 501, 501)))
    model = trained(train, args.steps)

    # the first mini-batches of all processes choose the directions, the second ones measure
    loader = DataLoader(train, 64, sampler=DistributedSampler(train))
    la = Laplace(model, "classification", "all", "kron", debias=True)
    la.fit(loader)
    assert la.n_data == len(train)  # dealt out, so counted once
    assert la.fit_cost.forward == 2 * 64 * dist.get_world_size()

    def share(data: TensorDataset) -> DataLoader:
        return DataLoader(data, 100, sampler=DistributedSampler(data, shuffle=False))

    sweep = sweep_prior_precision(la, share(validation))
    la.prior_precision = sweep.best("nll")
    report = evaluate(la, share(test))
    assert sweep.n_data == report.n_data == 501  # what the sampler repeats is dropped

    # %% The same posterior everywhere
    group = processes()
    assert group is not None
    traces = group.gather([float(lam.sum()) for block in la.H.eigenvalues for lam in block])
    assert all(trace == traces[0] for trace in traces)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, N = {la.n_data}, {la.fit_cost}")
        print(f"accuracy {report.accuracy:.3f}, NLL {report.nll:.3f}, ECE {report.ece:.3f}")
        print(f"{group.carried:,} bytes of factors, bases and metrics exchanged by rank 0")
    dist.barrier()  # nobody leaves while others still talk
    # DistributedDataParallel's reducer holds the group: it has to go before the group's threads do
    del la, model
    gc.collect()
    dist.destroy_process_group()
    return {"nll": report.nll, "accuracy": report.accuracy}


if __name__ == "__main__":
    main()
