"""What both debiased posteriors are: fitting by any method, predicting, tuning, diagnosis, saving.

The maths is in :mod:`laplace_debias.debias` and :mod:`laplace_debias.predictive`; this wires it to
laplace-torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from laplace.baselaplace import KronLaplace
from laplace.curvature import CurvatureInterface
from laplace.lllaplace import LLLaplace
from laplace.utils import Kron
from laplace.utils.enums import TuningMethod
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.data.processes import processes
from laplace_debias.data.reading import read
from laplace_debias.data.roles import training_size
from laplace_debias.data.targets import IGNORED
from laplace_debias.debias.auto import fit_auto
from laplace_debias.debias.bias import CurvatureBias, curvature_bias
from laplace_debias.debias.crossfit import fit_crossfit
from laplace_debias.debias.expected_bias import ExpectedBias, expected_bias_of
from laplace_debias.debias.options import (
    AUTO,
    SINGLE,
    TWO_BATCH,
    AutoOptions,
    CrossfitOptions,
    debias_mode,
    method_options,
)
from laplace_debias.debias.spectrum import FitResult, rebuild
from laplace_debias.debias.two_batch import fit_single, fit_two_batch
from laplace_debias.evaluation.grid_search import Loss, gridsearch_prior_precision
from laplace_debias.evaluation.tuning import check_logit_temperature, tune
from laplace_debias.evaluation.tuning_result import TuningResult
from laplace_debias.kfac.backend import HookEF, HookGGN, HookInterface, choose_backend
from laplace_debias.kfac.counts import FitCost, FitReport, report_of
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.few_rows import KFACApprox
from laplace_debias.kfac.thin import bases_of
from laplace_debias.kfac.upstream import supported_types
from laplace_debias.network.calling import OutputPicker
from laplace_debias.network.features import first_output
from laplace_debias.network.freezing import check_supported, unwrapped
from laplace_debias.network.layers import SUPPORTED_TYPES
from laplace_debias.network.loss import likelihood_name
from laplace_debias.network.objective import objective_of
from laplace_debias.network.preserve import no_autocast
from laplace_debias.network.runnable import check_no_autocast, check_runnable
from laplace_debias.network.selection import Parameters, select_parameters, selected
from laplace_debias.network.upstream import (
    answering,
    backend_of,
    device_of,
    dtype_of,
    hessian_factor,
    is_last_layer,
    kron_of,
    last_layer_of,
    row_keys,
    unchecked_prior,
)
from laplace_debias.network.vectors import Fisher, Sampler
from laplace_debias.posterior.fitting import check_fit, engine_of, posterior_of, training_data
from laplace_debias.posterior.options import (
    check_objective,
    check_prior_precision,
    check_scales,
    chosen_curvature,
    noise_ratios,
    warn_of_damping,
)
from laplace_debias.posterior.predictions import (
    inverse_link,
    kept_predictor,
    log_probabilities,
    predictive,
    sampled_outputs,
)
from laplace_debias.posterior.resuming import check_resumable, fit_checkpoint
from laplace_debias.posterior.several import agreed_seed, check_same_model, cost_of_all
from laplace_debias.posterior.state import load_state, save_state
from laplace_debias.predictive.predictions import DEFAULT_MEMORY_BUDGET
from laplace_debias.predictive.predictor import StructuredPredictor

__all__ = ["DebiasedPosterior"]

# 100 exact vectors per datum cost what 100 data cost with one random vector, which say more
MOST_EXACT_OUTPUTS = 100

if TYPE_CHECKING:  # the class that it comes before in the bases
    _Base = KronLaplace
else:
    _Base = object


@answering
class DebiasedPosterior(_Base):
    """What both debiased classes share; comes before laplace-torch's class in the bases.

    Attributes:
        debias: ``"auto"``, ``"two-batch"``, ``"crossfit"`` or ``"single"``.
        options: Options of ``"auto"`` and ``"crossfit"``, ``None`` for other methods.
        kfac_approx: How positions (pixels, tokens) are summed: ``"expand"``, ``"reduce"`` or
            ``"backpack"``, see :mod:`laplace_debias.kfac.grams`.
        fisher: Which vectors are propagated back: ``"exact"`` (all of them), ``"mc"`` (one random
            one per datum) or ``"empirical"`` (the loss gradient). By default exact ones, and a
            random one for more than 100 outputs.
        sampler: How ``fisher="mc"`` draws: ``"trace"``, or ``"label"`` as the textbook.
        generator: Source of all draws of a fit.
        fit_cost: Passes and seconds of the last fit.
        fit_report: The same in words, and how far from a full batch, at the prior of the fit.
        predictive_method: How predictions and sweeps get their moments: ``"exact"``; ``"top"``
            (exact variances of the classes that carry the probability); ``"samples"`` (of the
            weights, through the linearised network); ``"auto"`` (exact, unless that is dear).
        memory_budget: Bytes that a prediction should stay within.
        verify: Whether fits and predictors check on a few data that the model is one they can
            represent, see :func:`laplace_debias.check_model`.
        objective: What the training loss differs in from the plain one: ``class_weights``,
            ``label_smoothing``, ``ignore_index`` (the label of tokens or pixels that do not count;
            all as those of ``nn.CrossEntropyLoss``), or a vector as
            ``sigma_noise``, one noise per output: its ratios are fixed, and the attribute
            ``sigma_noise`` is a common factor of them, 1 at first, that stays tunable.
        parameters: Which parameters are Bayesian, whether frozen or not, see
            :func:`laplace_debias.network.selection.select_parameters`; ``requires_grad`` is left
            as it is.
        dict_key_w: The entry of mini-batches that are mappings which has sample weights, if any;
            others may be ``(X, y, w)``. The loss and its curvature are sums of ``w`` times each
            datum's.
        data_keys: The entries of inputs that are mappings which have one row per datum; by default
            all tensors with as many rows.
    """

    H: Any
    debias: str
    options: AutoOptions | CrossfitOptions | None = None
    fit_cost: FitCost | None = None
    fit_report: FitReport | None = None
    predictive_method: str = "auto"
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    _fitted: FitResult | None = None
    _logit_temperature: float = 1.0
    _kept: tuple[Any, StructuredPredictor] | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *args: Any,
        debias: bool | str = True,
        backend: type[CurvatureInterface] | None = None,
        kfac_approx: KFACApprox = "expand",
        fisher: Fisher | None = None,
        sampler: Sampler = "trace",
        generator: torch.Generator | None = None,
        verify: bool = True,
        data_keys: Iterable[str] | None = None,
        output: Callable[[Any], Tensor] | None = None,
        parameters: Parameters = None,
        class_weights: Any = None,
        label_smoothing: float = 0.0,
        ignore_index: int = IGNORED,
        dict_key_w: str = "sample_weight",
        **kwargs: Any,
    ) -> None:
        model = model if output is None else OutputPicker(model, output)
        self.debias = debias_mode(debias)
        model = unwrapped(model)
        self.verify, self.dict_key_w = verify, dict_key_w
        self.data_keys = None if data_keys is None else tuple(data_keys)
        self.kfac_approx, self.sampler, self.generator = kfac_approx, sampler, generator
        self.options = method_options(self.debias, kwargs, generator)
        kind = likelihood_name(likelihood)
        ratios, common = noise_ratios(kwargs.get("sigma_noise", 1.0))
        if ratios is not None:
            kwargs["sigma_noise"] = common
        self.objective = objective_of(kind, class_weights, label_smoothing, ratios, ignore_index)
        check_objective(self.objective, self.debias)
        foreign = None if issubclass(backend or HookGGN, HookInterface) else backend
        # laplace-torch writes into this dictionary
        kwargs["backend_kwargs"] = dict(kwargs.get("backend_kwargs") or {})
        default: Fisher = "empirical" if issubclass(backend or HookGGN, HookEF) else "exact"
        name = None if foreign is None else foreign.__name__
        self.fisher = chosen_curvature(self, kind, fisher, default, kwargs["backend_kwargs"], name)
        warn_of_damping(kwargs.get("damping"), stacklevel=3)
        self.exact_up_to = MOST_EXACT_OUTPUTS if fisher is None else math.inf
        # convolutions in the features are no concern of a last layer's factors
        all_layers = not issubclass(type(self), LLLaplace)
        types = SUPPORTED_TYPES
        if foreign is not None:
            backend = choose_backend(foreign, model if all_layers else nn.Identity())
            types = supported_types(backend)
        if parameters is not None and not all_layers:
            raise ValueError(
                "Expected `parameters` with subset_of_weights='all' only, got them with the last "
                "layer. Remedy: subset_of_weights='all', with parameters='head' for that layer."
            )
        kwargs["backend"] = backend or HookGGN
        check_runnable(model, copied=not all_layers)
        chosen = None if parameters is None else select_parameters(model, parameters)
        self.selected_parameters = chosen
        with nullcontext() if chosen is None else selected(model, chosen):
            if all_layers:
                check_supported(model, types)
            # laplace-torch knows no Bernoulli likelihood; nothing of its own depends on the links
            known = "classification" if kind == "bernoulli" else likelihood
            super().__init__(model, known, *args, **kwargs)
        self.likelihood = likelihood
        check_prior_precision(unchecked_prior(self)[0])  # unchecked while the last layer is unknown
        check_scales(self.sigma_noise, self.temperature)

    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool | None = None,
        *,
        curvature_loader: Iterable[Any] | None = None,
        n_data: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_seconds: float = 60.0,
        memory_budget: int | None = None,
    ) -> None:
        r"""Fit the posterior on the mini-batches of one or two loaders.

        One loader: its first mini-batch gives the directions, its second the curvatures, and the
        rest is not read. Two loaders: all of ``train_loader`` gives the directions, all of
        ``curvature_loader`` the curvatures, of any two sizes. With ``debias="single"`` everything
        in ``train_loader`` gives both; hand over ``next(iter(train_loader))`` and ``n_data`` for
        one mini-batch. With ``debias="auto"`` data are scored by forward passes, and drawn for
        backward passes in rounds. With ``debias="crossfit"`` the first ``n_folds`` mini-batches are
        the folds, unless its options say otherwise. The M data of each role stand for all N:

        .. math:: H = U \,\mathrm{diag}(\mathrm{diag}(U^\top K_2 U))\, U^\top, \qquad
                  K_1 = U \Lambda U^\top,

        with :math:`K_1, K_2` the K-FAC matrices of both roles, scaled by N / M. The loss that
        enters ``log_marginal_likelihood`` is scaled in the same way.

        Under a ``torch.distributed`` process group all processes call ``fit``, each with a loader
        of its share of the data, and end with the same posterior of all shares.

        The model is left as it was (but for laplace-torch's ``output_size``), and if anything
        raises, this object, too. ``fit_cost`` tells passes and seconds, ``fit_report`` in words.

        Args:
            train_loader: A loader of mini-batches ``(X, y)`` or mappings, any iterable of them, or
                one mini-batch ``(X, y)``; with sample weights ``(X, y, w)``.
            override: Whether to forget earlier fits. With ``False`` the factors of each role are
                added to those of earlier fits, each with its own N, and decomposed again (all
                weights only). With ``debias=True`` the earlier fits have to be made with ``False``
                as well: only then the factors of the curvatures are formed and kept.
            progress_bar: Whether to show one; by default on a terminal, after some seconds.
            curvature_loader: The data for the curvatures.
            n_data: N, by default ``len(train_loader.dataset)``.
            checkpoint: A file for what was done so far; the same call goes on from there after an
                interruption, and ends with the same bits. It is removed at the end. Each of several
                processes has its own, with ``.rank0``, ``.rank1``, ... added to the name.
            checkpoint_seconds: How often to write it.
            memory_budget: Bytes that the fit may add to what is there: mini-batches are passed in
                pieces then, and ``debias="auto"`` keeps fewer rows, probes and data; one that
                cannot hold the factors is refused.

        Raises:
            ValueError: If the loaders, targets or inputs do not fit; see the messages.
        """
        draws = self.options is not None
        check_fit(self.debias, curvature_loader=curvature_loader, override=override, draws=draws)
        check_no_autocast(device_of(self))
        if checkpoint is not None:
            check_resumable(self.debias, override=override)
        N = training_size(train_loader, curvature_loader, n_data)
        train_loader = self._prepare(train_loader, override)
        several = processes() is not None
        if several:
            check_same_model(self.model)
        past, kept = None if override else self._fitted, None
        with torch.inference_mode(False), engine_of(self, ours=self._ours()) as computing:
            loaders, engine = (train_loader, curvature_loader), computing[0]
            data = training_data(self, computing, loaders, N, memory_budget)
            if several and isinstance(engine, Engine):
                engine.draw_seed = agreed_seed(self.generator)
            if checkpoint is not None:
                more = (checkpoint_seconds, memory_budget)
                kept = fit_checkpoint(self, checkpoint, data, engine, *more)
            watched: Any = {"progress_bar": progress_bar, "checkpoint": kept}
            if isinstance(self.options, AutoOptions) and isinstance(engine, Engine):
                ridges = self._ridges(len(engine.names))
                fitted = fit_auto(engine, data, self.options, ridges, **watched)
            elif isinstance(self.options, CrossfitOptions) and isinstance(engine, Engine):
                fitted = fit_crossfit(engine, data, self.options, **watched)
            else:
                method = (
                    partial(fit_two_batch, keep_factors=not override)
                    if self.debias == TWO_BATCH
                    else fit_single
                )
                fitted = method(engine, data, past=past, **watched)
        self.take_over(fitted)
        self.fit_cost = cost = cost_of_all(engine.cost) if several else engine.cost
        self.fit_report = report_of(self.debias, cost, N, self.prior_precision, fitted.report)
        if kept is not None:
            kept.finish()

    def _ours(self) -> bool:
        """Whether this package's own engine makes the factors."""
        return issubclass(backend_of(self)[0], HookInterface)

    def _ridges(self, n_blocks: int) -> Tensor:
        """Prior precision over the Hessian factor, per block."""
        prior = torch.as_tensor(self.prior_precision).detach().double().reshape(-1)
        return (prior / hessian_factor(self).detach().double()).expand(n_blocks)

    @property
    def observation_noise(self) -> Tensor:
        """Standard deviation of the observation noise: one number, or one per output ``[C]``."""
        ratios = self.objective.output_noise
        return self.sigma_noise if ratios is None else self.sigma_noise * ratios.to(device_of(self))

    @property
    def log_likelihood(self) -> Tensor:
        """Log likelihood of the N training data; see laplace-torch."""
        ratios = self.objective.output_noise
        total = super().log_likelihood
        return total if ratios is None else total - self.n_data * ratios.log().sum().to(total)

    @property
    def parameter_names(self) -> list[str]:
        """Names of the Bayesian parameters, one per block of the posterior."""
        if is_last_layer(self):
            return [name for name, _ in last_layer_of(self.model).named_parameters()]
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [names[id(p)] for p in self.params]

    def _prepare(self, train_loader: Iterable[Any], override: bool) -> Iterable[Any]:
        """Learn what has to be known before the first factors; return the loader to read."""
        return train_loader

    def take_over(self, fitted: FitResult) -> None:
        """Make a fit the posterior, after everything that can raise.

        Args:
            fitted: What a method of fitting returned.

        Raises:
            ValueError: If its eigenvalues do not fit into the model's dtype.
        """
        H, mean = posterior_of(self, fitted)
        self._fitted, self.H, self.mean = fitted, H, mean
        self.loss, self.n_data = fitted.loss.to(dtype_of(self)), fitted.n_data
        self.n_outputs = fitted.n_outputs
        setattr(self.model, "output_size", fitted.n_outputs)  # noqa: B010  laplace-torch reads it

    def curvature_bias(self, fraction: float = 0.1) -> CurvatureBias:
        """How far the directions' data over-estimated their top curvature, per layer.

        Two mini-batches are one draw: where few data carry most of the curvature, the noise of
        the overall scale can hide the bias, and a ratio below 1 at both ends says just that.

        Args:
            fraction: Share of a layer's directions that counts as its top, and as its bottom.

        Returns:
            Biased and debiased mean curvatures at both ends; ``print`` shows a table.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: With ``"single"`` and ``"auto"``, where nothing is measured a second time.
        """
        fitted = self._posterior()
        if self.debias in (SINGLE, AUTO):
            raise ValueError(
                f"Expected a debiased fit, got debias={self.debias!r}, which measures curvatures "
                "once, on the data that chose their directions. Remedy: fit with debias=True."
            )
        return curvature_bias(self.parameter_names, fitted.lam, fitted.lam_tilde, fraction)

    def expected_bias(self, train_loader: Iterable[Any]) -> ExpectedBias:
        """How far these data would over-estimate their top curvature, from these data alone.

        Needs neither a fit nor a second mini-batch, see :mod:`laplace_debias.debias.expected_bias`.
        It costs the passes of ``debias="single"`` on the same data.

        Args:
            train_loader: One mini-batch ``(X, y)``, or a loader of which all is read.

        Returns:
            Rows, dimension, effective rows and expected over-estimation of every factor; ``print``
            shows a table.

        Raises:
            ValueError: With a backend of laplace-torch's, which does not tell its rows, or with
                fewer than two data.
        """
        loader = self._prepare(train_loader, True)
        with torch.inference_mode(False), engine_of(self, ours=self._ours()) as (engine, cast, _):
            if not isinstance(engine, Engine):
                raise ValueError(
                    "Expected the backend HookGGN or HookEF, which count the rows behind their "
                    f"factors, got {backend_of(self)[0].__name__}. Remedy: leave `backend` out."
                )
            batches = read(loader, device_of(self), self.dict_key_y, name="train_loader")
            return expected_bias_of(
                engine, ((cast(X), cast(y)) for X, y in batches), row_keys(self)
            )

    def state_dict(self, half: bool = False) -> dict[str, Any]:
        """The posterior as tensors, strings and numbers, for ``torch.load(weights_only=True)``.

        Args:
            half: Whether to store eigenvectors in half precision: half the bytes, exact no more.
        """
        state, kept = save_state(self, self._posterior()), torch.float16 if half else None
        state["eigenvectors"] = [[Q.to(kept or Q.dtype) for Q in b] for b in state["eigenvectors"]]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a posterior without fitting.

        Args:
            state_dict: What ``state_dict()`` returned for the same architecture.

        Raises:
            ValueError: If class, method, likelihood or parameters differ from this object's.
        """
        load_state(self, state_dict, self.take_over)

    def predictor(self) -> StructuredPredictor:
        """The linearised predictive at the current prior precision, kept between calls.

        It is made anew when the fit, the prior precision, the noise, the temperature, or the
        parameters (which, where, of which type) have changed; their values are the model's own.
        """
        make = partial(StructuredPredictor, self, memory_budget=self.memory_budget)
        kept = self._kept  # one read: another thread may swap it
        found = kept_predictor(self, kept, make)
        if found is not kept:
            self._kept = found
        predictor: StructuredPredictor = found[1]
        return predictor

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the kept predictor, which copies and pickles make for themselves."""
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    @no_autocast()
    def __call__(
        self,
        x: Inputs,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Posterior predictive, as laplace-torch's, in evaluation mode and with its ``generator``.

        Args:
            x: Inputs ``[n, ...]``, a mapping, or a tuple of positional arguments.
            pred_type: ``"glm"`` (linearised network) or ``"nn"`` (sampled networks).
            joint: Regression: whether to return the covariance across data.
            link_approx: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"``.
            n_samples: Number of samples for ``"mc"`` and for ``pred_type="nn"``.
            diagonal_output: Whether to drop covariances between outputs.
            generator: Source of every random number drawn in this call.
            fitting: For ``likelihood="reward_modeling"``: whether ``x`` holds pairs, as in the fit,
                whose preferences are predicted, instead of single inputs and their rewards.
            **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

        Returns:
            Class probabilities ``[n, C]``, in general of the outputs' shape (with
            ``likelihood="bernoulli"`` those of yes for each output), or for regression and rewards
            mean and (co)variance.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: For unknown arguments, or a generator on another device.
        """
        self.check_fitted()
        options = (n_samples, diagonal_output, generator)
        more = {"joint": joint, "fitting": fitting, **model_kwargs}
        return predictive(self, x, pred_type, link_approx, options, **more)

    @no_autocast()
    def log_probabilities(
        self,
        x: Inputs,
        pred_type: str = "glm",
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Logarithms of the class probabilities, also of those too small for their dtype.

        The logarithm of ``la(x)`` is minus infinity where a probability underflows; here it is
        a number. Metrics are computed from it.

        Args:
            x: Inputs ``[n, ...]``, a mapping, or a tuple of positional arguments.
            pred_type: ``"glm"`` (linearised network) or ``"nn"`` (sampled networks).
            link_approx: ``"probit"``, ``"mc"``, ``"bridge"`` or ``"bridge_norm"``.
            n_samples: Number of samples for ``"mc"`` and for ``pred_type="nn"``.
            diagonal_output: Whether to drop covariances between outputs.
            generator: Source of every random number drawn in this call.
            **model_kwargs: For the network's forward pass with ``pred_type="nn"``.

        Returns:
            Log-probabilities ``[n, C]``, in general of the outputs' shape; with
            ``likelihood="bernoulli"`` of no and yes for each output, ``[n, C, 2]``.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: For a regression, unknown arguments, or a generator on another device.
        """
        self.check_fitted()
        options = (n_samples, diagonal_output, generator)
        return log_probabilities(self, x, pred_type, link_approx, options, **model_kwargs)

    def output_moments(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Exact means and (co)variances of the linearised network's outputs.

        Args:
            X: Inputs of n data.
            joint: Whether to return the covariance across data.
            diagonal_output: Whether to return variances only.

        Returns:
            Means ``[n, C]`` and covariances ``[n, C, C]``, or variances ``[n, C]``; with ``joint``
            means ``[n * C]`` and covariances ``[n * C, n * C]``. With positions (tokens, pixels),
            classes last: ``[n, *positions, C]`` and ``[n, *positions, C, C]``.
        """
        self.check_fitted()
        result = self.predictor()(X, diagonal_output and not joint, joint)
        return result.mean.flatten() if joint else result.mean, result.covariance

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Output means and variances ``[n, C]`` (laplace-torch raises for Kron)."""
        return self.output_moments(X, diagonal_output=True)

    @no_autocast()
    def functional_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the network's outputs, ``[S, n, C]``; see laplace-torch.

        Raises:
            ValueError: For outputs with positions, whose covariances across positions they lack.
        """
        self.check_fitted()
        X = args[0] if args else kwargs["x"]
        if first_output(self.model, X, row_keys(self)).ndim > 2:
            raise ValueError(
                "Expected outputs [n, C] for functional samples, got positions (tokens, pixels). "
                "Remedy: `la.predictor().samples(x, n_samples)` draws all positions together."
            )
        return super().functional_samples(*args, **kwargs)

    def predictive_samples(self, *args: Any, **kwargs: Any) -> Tensor:
        """Samples of the predictive, ``[S, n, C]``; see laplace-torch."""
        return inverse_link(self, self.functional_samples(*args, **kwargs))

    @no_autocast()
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Weight samples ``[S, P]`` from the posterior; see laplace-torch."""
        self.check_fitted()
        return super().sample(n_samples, generator)

    def network_samples(
        self,
        X: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Outputs of networks with sampled weights.

        Args:
            X: Inputs of n data.
            n_samples: Number S of networks.
            generator: Source of the samples.
            **model_kwargs: For the network's forward pass.

        Returns:
            Outputs ``[S, n, C]``; the model is never written to.
        """
        return sampled_outputs(self, X, n_samples, generator, **model_kwargs)

    def network_predictions(
        self,
        X: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The same as class probabilities, or for regression as they are."""
        fs = self.network_samples(X, n_samples, generator, **model_kwargs)
        return inverse_link(self, fs)

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | torch.Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Any = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool | None = None,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Choose the prior precision, as laplace-torch does.

        ``method="gridsearch"`` evaluates all grid points in one pass over the data, each with a
        fresh metric, never chooses NaN, and leaves the prior precision as it was if anything
        raises. ``method="marglik"`` is laplace-torch's.

        Args:
            pred_type: ``"glm"`` or ``"nn"`` (one pass per grid point).
            method: ``"marglik"`` or ``"gridsearch"``.
            n_steps: Gradient steps on the marginal likelihood.
            lr: Learning rate of these steps.
            init_prior_prec: Where these steps start.
            prior_structure: ``"scalar"`` or ``"layerwise"``, for the marginal likelihood.
            val_loader: Validation data for the grid search.
            loss: A ``torchmetrics.Metric`` or a function; by default the negative log likelihood,
                for regression that of the Gaussian predictive.
            log_prior_prec_min: Exponent of the smallest prior precision of the grid.
            log_prior_prec_max: Exponent of the largest.
            grid_size: Number of grid points.
            link_approx: Link approximation of the grid search; use the one you predict with.
            n_samples: Number of samples, where there are any.
            verbose: Whether to print the result.
            progress_bar: Show a progress bar; by default on a terminal, if it takes some
                seconds.
            log_prior_prec_base: Base of the exponents.

        Raises:
            AttributeError: Before ``fit``.
            ValueError: If there is no validation loader, or an argument is unknown.
        """
        self.check_fitted()
        before = self.prior_precision
        try:
            if method == TuningMethod.GRIDSEARCH:
                result = gridsearch_prior_precision(
                    self,
                    val_loader,
                    predictor_of=StructuredPredictor,
                    pred_type=pred_type,
                    loss=loss,
                    log_prior_prec_min=log_prior_prec_min,
                    log_prior_prec_max=log_prior_prec_max,
                    grid_size=grid_size,
                    log_prior_prec_base=log_prior_prec_base,
                    link_approx=link_approx,
                    n_samples=n_samples,
                    progress_bar=progress_bar,
                )
                self.prior_precision = result.best("loss")
                if verbose:
                    print(f"Optimized prior precision is {self.prior_precision}.")
            else:
                super().optimize_prior_precision(
                    pred_type,
                    method,
                    n_steps,
                    lr,
                    init_prior_prec,
                    prior_structure,
                    val_loader,
                    verbose=verbose,
                    progress_bar=bool(progress_bar),
                )
        except BaseException:
            self.prior_precision = before
            raise

    @property
    def logit_temperature(self) -> float:
        """T, by which logits are divided: their means by T, their (co)variances by its square.

        It is 1 unless set or tuned, and unlike laplace-torch's ``temperature`` (which multiplies
        the posterior covariance) leaves the posterior over weights alone. Outputs as such
        (``functional_samples``, ``output_moments``), rewards and regressions are not divided.
        """
        return self._logit_temperature

    @logit_temperature.setter
    def logit_temperature(self, value: float) -> None:
        check_logit_temperature(value)
        self._logit_temperature = float(value)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Class probabilities of given logits, ``softmax(f / T)``.

        Args:
            outputs: Logits ``[..., C]``.
        """
        return torch.softmax(outputs / self.logit_temperature, dim=-1)

    def tune(
        self, val_loader: Iterable[Any], objective: str = "nll", **options: Any
    ) -> TuningResult:
        """Choose prior precision and ``logit_temperature`` on validation data, and take them.

        Args:
            val_loader: Validation data; training data would choose far too large a precision.
            objective: A metric. For ``"nll"`` a regression's ``sigma_noise`` is chosen as well.
            **options: Of :func:`laplace_debias.evaluation.tuning.tune`.

        Returns:
            What was tried; printed, it says what was chosen.
        """
        result = tune(self, val_loader, objective, predictor_of=StructuredPredictor, **options)
        if result.noise_scales is not None:
            self.sigma_noise = self.sigma_noise * result.noise_scale
        self.prior_precision = result.prior_precision
        self.logit_temperature = result.logit_temperature
        return result

    @property
    def H_facs(self) -> Kron | None:
        """Undecomposed factors of the posterior, as laplace-torch keeps them; built on demand."""
        if self._fitted is None:
            return None
        return kron_of(rebuild(bases_of(self.H), self.H.eigenvalues))

    @H_facs.setter
    def H_facs(self, value: Kron | None) -> None:
        if value is not None:
            raise AttributeError(
                "Expected the factors to come from `fit` or `load_state_dict`, got an assignment. "
                "Remedy: call one of these."
            )

    @no_autocast()
    def log_marginal_likelihood(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log marginal likelihood of all N training data; see laplace-torch."""
        self.check_fitted()
        return super().log_marginal_likelihood(*args, **kwargs)

    @property
    def prior_precision(self) -> Tensor:
        """Prior precision, one number or one per parameter tensor."""
        return cast(Tensor, KronLaplace.prior_precision.__get__(self))

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        check_prior_precision(value)
        KronLaplace.prior_precision.__set__(self, value)

    def check_fitted(self) -> None:
        """Raise unless there is a posterior.

        Raises:
            AttributeError: Before ``fit`` or ``load_state_dict``.
        """
        self._posterior()

    def _posterior(self) -> FitResult:
        """The last fit, or an error."""
        if self._fitted is None:
            raise AttributeError(
                f"Expected a fitted {type(self).__name__}, got one without a posterior. Remedy: "
                "call `la.fit(train_loader)` or `la.load_state_dict(...)` first."
            )
        return self._fitted
