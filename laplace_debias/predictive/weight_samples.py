r"""Samples of the linearised network's outputs by forward-mode products.

:math:`f_s = f + J (\theta_s - \theta^*)` with :math:`\theta_s - \theta^* = P^{-1/2} \epsilon_s`,
one Jacobian-vector product per sample. Its cost does not depend on the number of outputs, and no
covariance is formed: the way to go for a thousand classes. More than three prior precisions are
made of a few (:mod:`laplace_debias.predictive.sample_nodes`).

A layer that the model runs under ``torch.no_grad`` is constant for the exact way but not for this
one: PyTorch's forward mode looks through ``no_grad``. Use ``detach`` to stop both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from laplace.baselaplace import KronLaplace
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace_debias.data.inputs import Inputs, size_of, take
from laplace_debias.kfac.thin import from_coordinates
from laplace_debias.network.calling import call_model, classes_last
from laplace_debias.network.features import outputs_and_features
from laplace_debias.network.preserve import Change, held
from laplace_debias.network.recorder import Recorder
from laplace_debias.network.substitution import substituted
from laplace_debias.network.upstream import feature_extractor, row_keys
from laplace_debias.predictive.eigenblocks import EigenBlock, has_closed_form
from laplace_debias.predictive.links import check_n_samples

_forward_mode_lock = threading.Lock()
"""PyTorch's forward mode keeps its level in a global variable: one thread at a time."""
Draws = Callable[["torch.Generator | None"], Iterator[tuple[int, Tensor]]]
"""Yields numbers of prior precisions with samples minus outputs, ``[s, n, *positions, C]``."""


def posterior_step(eps: Tensor, block: EigenBlock, k: int) -> Tensor:
    r"""Turn standard normal numbers into posterior samples minus their mean.

    :math:`Q_B \, [\, E / \sqrt{\lambda + \delta_k} \,] \, Q_A^\top`, with :math:`E` the numbers in
    the shape of the weight, drawn along the eigenvectors; for a single factor
    :math:`Q \, [\, \epsilon / \sqrt{\lambda + \delta_k} \,]`. Thin eigenvectors stand for
    their frame, :math:`U \, \mathrm{diag}(w)\, U^\top` being the same covariance.

    Args:
        eps: Standard normal numbers ``[S, D]``, one for each of the block's eigenvalues.
        block: The posterior's block.
        k: Which of its prior precisions.

    Returns:
        Steps in the shape of the parameter, ``[S, *param.shape]``.
    """
    scale = (block.lam + block.delta[k]).rsqrt()
    if len(block.Q) == 1:
        step = from_coordinates(eps * scale, block.Q[0])
    else:
        Q_B, Q_A = block.Q
        E = from_coordinates(eps.unflatten(1, block.lam.shape) * scale, Q_A)
        step = from_coordinates(E.mT, Q_B).mT
    return step.reshape(len(eps), *block.param.shape).to(block.param.dtype)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Avoid the fused attention kernels, which have no forward-mode derivative."""
    with held([Change("attention kernels", _plain_attention)]):
        yield


def _plain_attention() -> Callable[[], None]:
    """Switch the fused attention kernels off; return what undoes it."""
    switches = ExitStack()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    switches.callback(torch.backends.mha.set_fastpath_enabled, fast)
    switches.enter_context(sdpa_kernel(SDPBackend.MATH))
    return switches.close


class WeightSampler:
    """Draw samples of the weights and push them through the linearised network.

    All prior precisions share the same standard normal numbers, so differences between them are
    not noise. The numbers are drawn one sample at a time: the result for a given generator does
    not depend on the memory budget.

    Args:
        la: A fitted Kron Laplace approximation.
        blocks: The blocks of its posterior.
        memory_budget: Bytes to stay within.
        keep_graph: Allow differentiating with respect to the inputs.
        coefficients: What makes samples at k prior precisions of those at the r of the blocks,
            ``[r, k]``; by default the blocks' prior precisions are those that are wanted.
    """

    def __init__(
        self,
        la: KronLaplace,
        blocks: list[EigenBlock],
        memory_budget: int,
        keep_graph: bool,
        coefficients: Tensor | None = None,
    ) -> None:
        """Keep the arguments."""
        self.la, self.blocks, self.coefficients = la, blocks, coefficients
        self.memory_budget, self.keep_graph = memory_budget, keep_graph

    def __call__(
        self, x: Inputs, n_samples: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return outputs ``[n, *positions, C]`` and samples ``[k, n_samples, n, *positions, C]``.

        Raises:
            ValueError: If ``n_samples`` is not positive.
        """
        c = self.coefficients
        parts: list[list[Tensor]] = [
            [] for _ in range(len(self.blocks[0].delta) if c is None else c.shape[1])
        ]
        with self._prepared(x, n_samples) as (f, draws):
            for i, new in draws(generator):
                parts[i].append(f + new)
        return f, torch.stack([torch.cat(part) for part in parts])

    def moments(
        self,
        x: Inputs,
        n_samples: int,
        generator: torch.Generator | None,
        diagonal: bool,
    ) -> tuple[Tensor, Tensor]:
        r"""Return outputs and the samples' second moments, of which few are held at once.

        :math:`\frac{1}{S} \sum_s (f_s - f) (f_s - f)^\top` for the outputs of each position.

        Args:
            x: The data.
            n_samples: Number S of samples.
            generator: Source of randomness.
            diagonal: Whether variances are enough.

        Returns:
            Outputs ``[n, *positions, C]`` and moments ``[n, *positions, C, C, k]``, with
            ``diagonal`` ``[n, *positions, C, k]``.

        Raises:
            ValueError: If ``n_samples`` is not positive.
        """
        totals: dict[int, Tensor] = {}
        with self._prepared(x, n_samples) as (f, draws):
            for i, d in draws(generator):
                new = (
                    d.square().sum(0) if diagonal else torch.einsum("s...c,s...d->...cd", d, d)
                ) / n_samples
                totals[i] = totals[i] + new if i in totals else new
        return f, torch.stack([totals[i] for i in range(len(totals))], dim=-1)

    @contextmanager
    def _prepared(self, x: Inputs, n_samples: int) -> Iterator[tuple[Tensor, Draws]]:
        """The outputs, and what draws differences to them, prior precision by prior precision."""
        check_n_samples(n_samples)
        with torch.set_grad_enabled(self.keep_graph):
            if has_closed_form(self.la):
                f, phi = outputs_and_features(feature_extractor(self.la.model), x)
                yield f, partial(self._last_layer, f, phi, n_samples)
                return
            with forward_mode():
                yield self._all_layers(x, n_samples)

    def _draw(self, n_samples: int, generator: torch.Generator | None) -> list[Tensor]:
        """Draw standard normal numbers for every block, ``[n_samples, D]`` each."""
        like = self.blocks[0].lam
        sizes = [block.lam.numel() for block in self.blocks]
        rows = [
            torch.randn(sum(sizes), generator=generator, dtype=like.dtype, device=like.device)
            for _ in range(n_samples)
        ]
        return list(torch.stack(rows).split(sizes, dim=1))

    def _last_layer(
        self, f: Tensor, phi: Tensor, n_samples: int, generator: torch.Generator | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``phi dW^T + db`` of some samples, for one prior precision after the other."""
        rows = phi if f.ndim == 2 else phi.flatten(0, -2)
        numel = sum(block.lam.numel() for block in self.blocks) + f.numel()
        size = max(1, self.memory_budget // (4 * numel * f.element_size()))
        for start in range(0, n_samples, size):
            eps = self._draw(min(size, n_samples - start), generator)
            for k in range(len(self.blocks[0].delta)):
                steps = [posterior_step(e, b, k) for e, b in zip(eps, self.blocks, strict=True)]
                moved = [rows @ s.mT if s.ndim == 3 else s.unsqueeze(1) for s in steps]
                total = sum(moved[1:], moved[0])
                shape = (len(total), len(f.flatten(0, -2)), f.shape[-1])
                yield k, total.expand(shape).reshape(len(total), *f.shape)

    def _all_layers(self, x: Inputs, n_samples: int) -> tuple[Tensor, Draws]:
        """Vectorise forward-mode products over samples, in chunks of samples and of data."""
        la, key = self.la, row_keys(self.la)
        params = [block.param for block in self.blocks]
        theta = [p.detach() for p in params]
        n = size_of(x, key)
        per_datum = self._bytes_per_datum(take(x, slice(0, 1), key))
        rows = max(1, min(n, self.memory_budget // per_datum))
        size = self.memory_budget // (
            rows * per_datum + 4 * sum(t.numel() * t.element_size() for t in theta)
        )
        size = max(1, min(n_samples, size))
        chunks = [take(x, slice(i, i + rows), key) for i in range(0, n, rows)]
        with torch.set_grad_enabled(self.keep_graph):
            f = torch.cat([classes_last(call_model(la.model, chunk)) for chunk in chunks])

        def product(chunk: Inputs, step: list[Tensor]) -> Tensor:
            def at(weights: list[Tensor]) -> Tensor:
                with substituted(zip(params, weights, strict=True)):
                    return classes_last(call_model(la.model, chunk))

            out: Tensor = jvp(at, (theta,), (step,))[1]
            return out

        def products(chunk: Inputs, steps: list[Tensor]) -> Tensor:
            if len(steps[0]) == 1:  # vectorising costs a fifth
                return product(chunk, [step[0] for step in steps]).unsqueeze(0)
            out: Tensor = vmap(lambda step: product(chunk, step))(steps)
            return out

        def draws(generator: torch.Generator | None) -> Iterator[tuple[int, Tensor]]:
            for start in range(0, n_samples, size):
                eps = self._draw(min(size, n_samples - start), generator)
                nodes = []
                for k in range(len(self.blocks[0].delta)):
                    steps = [
                        posterior_step(e, block, k)
                        for e, block in zip(eps, self.blocks, strict=True)
                    ]
                    with _forward_mode_lock:
                        moved = [products(chunk, steps) for chunk in chunks]
                    if self.coefficients is None:
                        yield k, torch.cat(moved, dim=1)
                    else:
                        nodes.append(torch.cat(moved, dim=1))
                if self.coefficients is not None:
                    for k, c in enumerate(self.coefficients.to(nodes[0].dtype).T):
                        yield k, torch.tensordot(c, torch.stack(nodes), dims=1)

        return f, draws

    def _bytes_per_datum(self, x: Inputs) -> int:
        """Estimate the memory of one forward-mode product for one datum, from its activations."""
        leaves = (m for m in self.la.model.modules() if not list(m.children()))
        recorder = Recorder(leaves, edges=False)
        with recorder.recording():
            call_model(self.la.model, x)
        calls = [call for found in recorder.calls.values() for call in found]
        return 4 * max(1, sum(call.shape.numel() * call.dtype.itemsize for call in calls))
