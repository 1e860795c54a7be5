"""Input factors of convolutions from few data: plain, or carried to the pixels of all data.

Output factors are those of the full batch, so that what is left of the distance to its posterior
(``posterior_distance``, test and far inputs) is due to the input factors of convolutions alone.

    python -m examples.research.input_factors --draws 8
    python -m examples.research.input_factors --problems All-CNN-C --folder DATA --weights WEIGHTS
"""

# %% Imports
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from examples.research.inverse_lab import reference
from examples.research.inverse_problems import PROBLEMS, InverseProblem, all_cnn_c
from laplace_debias import posterior_distance
from laplace_debias.debias.eigen import eigh_float64
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.debias.transport import carried, pixel_block
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors
from laplace_debias.posterior import DebiasedKronLaplace

Inputs = list[Tensor | None]
CONVOLUTIONS = ("digits-cnn", "28x28-cnn", "digits-resnet")


# %% Input factors
def inputs_of(engine: Engine, x: Tensor) -> Factors:
    """Input factors of some data."""
    first, *others = (engine.factors(part, outputs=False) for part in x.split(100))
    first = replace(first, outputs=None)
    return sum((replace(part, outputs=None) for part in others), first)


def from_few(engine: Engine, few: Factors, whole: Factors, *, carry: bool) -> Inputs:
    """All data's, but for those of patches."""
    found: Inputs = list(whole.A)
    for i, (p, A, target) in enumerate(zip(engine.owned, few.A, whole.A, strict=True)):
        k = p.n_pixels
        if A is not None and target is not None and k > 1:
            found[i] = carried(A, pixel_block(target, len(A) // k)) if carry else A
    return found


def with_inputs(p: InverseProblem, full: FitResult, prior: float, A: Inputs) -> DebiasedKronLaplace:
    """The full batch's posterior with other input factors."""
    Q, lam = [list(block) for block in full.Q], [list(block) for block in full.lam]
    for i, M in enumerate(A):
        if M is not None:
            values, Q[i][1] = eigh_float64(M, "A")
            lam[i][1] = values.clamp(min=0).to(lam[i][0])
            Q[i][1] = Q[i][1].to(Q[i][0])
    la = p.laplace("single", prior)
    la.fit(p.batches(p.x[:2], p.y[:2]), n_data=len(p.x))
    la.take_over(replace(full, Q=Q, lam=lam, lam_tilde=lam))
    return la


# %% Distances
def rows_of(p: InverseProblem, prior: float, sizes: tuple[int, ...], draws: int) -> list[str]:
    """Lines of a table: distances with the patches of some numbers of data."""
    reference_la = reference(p, prior)
    full, engine = reference_la._posterior(), Engine(p.model, p.likelihood)
    whole, generator, lines = inputs_of(engine, p.x), torch.Generator().manual_seed(0), []
    for m in sizes:
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(draws):
            few = inputs_of(engine, p.draw(m, generator)[0])
            for carry, rows in found.items():
                la = with_inputs(p, full, prior, from_few(engine, few, whole, carry=carry))
                rows.append([posterior_distance(la, reference_la, x) for x in (p.x_test, p.far)])
        cells = (
            " / ".join(f"{mean(values):.4f}" for values in zip(*rows, strict=True))
            for rows in found.values()
        )
        lines.append(f"| {p.name} | {prior:g} | {m} of {len(p.x)} | " + " | ".join(cells) + " |")
    return lines


# %% Everything
def main(argv: list[str] | None = None) -> None:
    """Draw, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CONVOLUTIONS, "All-CNN-C"]
    parser.add_argument("--problems", nargs="*", choices=names, default=list(CONVOLUTIONS))
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--sizes", nargs="*", type=int, default=[64, 256])
    parser.add_argument("--folder", type=Path, help="holds CIFAR-10 (All-CNN-C)")
    parser.add_argument("--weights", type=Path, help="of All-CNN-C")
    args = parser.parse_args(argv)
    made: dict[str, Callable[[], InverseProblem]] = dict(PROBLEMS)
    made["All-CNN-C"] = partial(all_cnn_c, args.folder, args.weights)
    print("| problem | prior precision | data | of these data alone | carried to all pixels |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.problems:
        p = made[name]()
        for prior in p.prior_precisions:
            print("\n".join(rows_of(p, prior, tuple(args.sizes), args.draws)), flush=True)


if __name__ == "__main__":
    main()
