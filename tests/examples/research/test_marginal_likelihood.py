"""The marginal likelihood's prior is smaller than the swept one, and its NLL worse."""

from examples.research import marginal_likelihood


def test_the_post_hoc_marginal_likelihood_picks_too_small_a_prior(capsys):
    found = marginal_likelihood.main(["--networks", "mlp", "--epochs", "20"])["mlp"]
    assert found["marglik prior"] < found["swept prior"]
    assert found["marglik nll"] > found["swept nll"]
    assert capsys.readouterr().out.startswith("mlp: plain nll")
