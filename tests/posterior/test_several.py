"""Two and three gloo processes against one: the same posterior, numbers, and errors.

The processes are started once for each number of them, see ``tests.distributed_jobs``.
"""

import pytest
import torch
import torch.distributed as dist

from laplace_debias import Laplace
from laplace_debias.data.processes import Processes, processes, shared_out, together
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.sums import factors_of_all
from tests import cases
from tests import distributed_jobs as jobs

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module", params=[2, 3])
def several(request, tmp_path_factory):
    codes, results = jobs.started(request.param, tmp_path_factory.mktemp("several"))
    assert codes == [0] * (request.param - 1) + [-9]  # the last one was killed at the end
    return results


@pytest.fixture(scope="module")
def alone():
    """The same fits in this process."""
    kept = {}

    def fit(name):
        if name not in kept:
            kept[name] = jobs.fit(name)
        return kept[name]

    return fit


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield processes()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", jobs.FITS)
def test_several_processes_give_the_posterior_of_one(name, several, alone):
    expected = alone(name)
    for found in (result[name] for result in several):
        scale = float(expected["H"].abs().max())
        torch.testing.assert_close(found["H"] / scale, expected["H"] / scale, **CLOSE)
        for key in ("loss", "variance"):
            torch.testing.assert_close(found[key], expected[key], **CLOSE)
        for key in ("n_data", "passes", "reason"):
            assert found[key] == expected[key]


@pytest.mark.parametrize("name", jobs.EVALUATED)
def test_several_processes_give_the_metrics_of_one(name, several, alone):
    expected = alone(name)
    for found in (result[name] for result in several):
        torch.testing.assert_close(found["prior"], expected["prior"], **CLOSE)
        assert found["n_sweep"] == expected["n_sweep"]
        assert found["report"] == pytest.approx(expected["report"], rel=1e-6, abs=1e-6)
        for metric, values in expected["sweep"].items():
            assert found["sweep"][metric] == pytest.approx(values, rel=1e-6, abs=1e-7)
        assert found["report"]["nll"] == pytest.approx(expected["report"]["nll"], rel=1e-12)
        assert found["sweep"]["nll"] == pytest.approx(expected["sweep"]["nll"], rel=1e-12)


@pytest.mark.parametrize("name", jobs.FITS)
def test_every_process_ends_with_the_same_bits(name, several):
    assert len({result[name]["bits"] for result in several}) == 1


def test_draws_are_keyed_by_the_datum(several, group_of_one):
    """Whatever the number of processes, if there is a group; other seeds, other draws."""
    expected = jobs.sampled()
    for result in several:
        torch.testing.assert_close(result["sampled"]["H"], expected["H"], **CLOSE)
    other = Laplace(
        cases.MLP.model(), "classification", "all", "kron", debias=True, fisher="mc",
        generator=torch.Generator().manual_seed(4),
    )  # fmt: skip
    other.fit(jobs.batches(cases.MLP, (), None), n_data=jobs.N)
    assert (other.H.to_matrix() - expected["H"]).abs().max() > 1e-3


def test_draws_by_scores_from_training_are_those_of_one_process(several, group_of_one):
    expected = jobs.stale()
    for result in several:
        torch.testing.assert_close(result["stale"]["H"], expected["H"], **CLOSE)


@pytest.mark.parametrize("job", ["budgeted", "patches"])
def test_all_keep_the_same_within_a_budget_and_see_as_many_patches(job, several):
    expected = getattr(jobs, job)()
    for result in several:
        found = result[job]
        torch.testing.assert_close(found["H"], expected["H"], **CLOSE)
        assert found["distance"] == pytest.approx(expected["distance"], rel=1e-6)


def test_tuning_takes_the_shares_of_all(several):
    expected = jobs.tuned()
    for result in several:
        found = result["tuned"]
        assert found["n_data"] == expected["n_data"] == 40
        for key in ("values", "plain", "trial", "marglik"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-7)


def test_a_comparison_takes_the_shares_of_all(several):
    """The second time from the cells that rank 0 has kept."""
    expected = jobs.compared()
    for result in several:
        first, second = result["compared"]
        assert first == second
        assert set(first) == set(expected)
        for cell, values in expected.items():
            assert first[cell] == pytest.approx(values, rel=1e-5, abs=1e-6)
        assert any("ood_auroc" in name for values in expected.values() for name in values)


def test_rank_0_alone_warns(several):
    for name in jobs.FITS:
        assert not any(result[name]["warnings"] for result in several[1:])


def test_data_that_a_sampler_repeats_are_dropped(several):
    """61 data do not come out even; the wrapped model is understood."""
    expected = jobs.dealt_out()
    for result in several:
        found = result["dealt out"]
        torch.testing.assert_close(found["H"], expected["H"], **CLOSE)
        for key in ("n_data", "passes", "n_report"):
            assert found[key] == expected[key]
        assert found["n_data"] == found["n_report"] == 61
        assert found["ece"] == pytest.approx(expected["ece"], abs=1e-6)


def test_datasets_of_their_own_add_up_and_rank_0_warns(several):
    assert [result["in order"]["n_data"] for result in several] == [40 * len(several)] * len(
        several
    )
    warned = [len(result["in order"]["warnings"]) for result in several]
    assert warned == [1] + [0] * (len(several) - 1)


@pytest.mark.parametrize("where", ["role 0", "role 1", "evaluation", "sweep"])
def test_a_process_that_raises_brings_down_all_with_its_message(where, several):
    errors = [result["failing"][where]["error"] for result in several]
    assert "NaN or Inf" in errors[1] and "in rank 1" not in errors[1]
    for rank in (rank for rank in range(len(several)) if rank != 1):
        assert "got an error in rank 1: " in errors[rank] and "NaN or Inf" in errors[rank]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "same weights in every process"),
        ("n_data", "same `n_data`"),
    ],
)
def test_what_cannot_be_right_is_refused_by_all(what, message, several):
    for result in several:
        assert message in result["failing"][what]["error"]


def test_a_process_that_is_killed_is_named_within_the_time_out(several):
    last = len(several) - 1
    for result in several[:-1]:
        found = result["killed"]
        assert f"no answer from rank {last}:" in found["error"]
        assert found["seconds"] < jobs.TIMEOUT


def test_jobs_are_dealt_out_by_cost():
    costs = [d**3 for d in (10, 9, 8, 7, 3, 3)]
    ranks = shared_out(costs, Processes(0, 2))
    loads = [sum(c for c, r in zip(costs, ranks, strict=True) if r == k) for k in (0, 1)]
    assert max(loads) < 1.15 * min(loads)
    assert shared_out(costs, None) == [0] * 6


def test_a_group_of_one_changes_nothing_but_counts_bytes(group_of_one):
    X, y = cases.MLP.data(10)
    factors = Engine(cases.MLP.model(), "classification").factors(X, y)
    copies = [[factor.clone() for factor in block] for block in factors.blocks]
    summed = factors_of_all(factors, torch.device("cpu"))
    for block, others in zip(summed.blocks, copies, strict=True):
        for one, other in zip(block, others, strict=True):
            assert torch.equal(one, other)
    assert summed.B[0] is summed.B[1]  # a layer's weight and bias go over the wire once
    sizes = [M.nbytes for M in {id(M): M for b in summed.blocks for M in b}.values()]
    assert group_of_one.carried == 2 * (sum(sizes) + 8)
    with pytest.raises(KeyError), together("nothing"):
        raise KeyError("own")
    kept = Engine(cases.MLP.model(), "classification").factors(X, y, outputs=False)
    with pytest.raises(ValueError, match="output factors|without outputs"):
        factors_of_all(kept, torch.device("cpu"))
