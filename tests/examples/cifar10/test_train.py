"""The trainer of the CIFAR example, on tiny made files: recipes, interruptions, optimisers."""

import json

import pytest
import torch

from examples.cifar10 import train
from examples.networks import make_model


def run(root, out, *more):
    flags = f"--data {root} --out {out} --model convnet-1-4 --epochs 3 --batch-size 8 --seed 3"
    return train.main([*flags.split(), "--validation-size", "7", "--flip", *more])


def test_an_interrupted_run_ends_like_an_uninterrupted_one(tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    state = torch.get_rng_state()
    history = run(root, whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(run(root, parts, "--max-epochs", "1")) == 1
    assert not (parts / "final.pt").exists()
    assert run(root, parts, "--max-epochs", "1")[:1] == history[:1]
    assert run(root, parts) == history
    expected = torch.load(whole / "final.pt", weights_only=True)
    for name, tensor in torch.load(parts / "final.pt", weights_only=True).items():
        assert torch.equal(tensor, expected[name]), name
    assert sorted(path.name for path in parts.glob("epoch_*.pt")) == [
        f"epoch_000{i}.pt" for i in (1, 2, 3)
    ]
    assert "3 of 3" not in (whole / "train.log").read_text()
    run(root, whole)  # nothing left to do
    assert "3 of 3 epochs done" in (whole / "train.log").read_text()


def test_a_folder_of_another_recipe_is_refused(tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    run(root, tmp_path / "run", "--max-epochs", "1")
    with pytest.raises(ValueError, match=r"lr: 0.001 there, 0.5 now"):
        run(root, tmp_path / "run", "--lr", "0.5")


def test_training_starts_from_given_weights(tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    torch.manual_seed(11)
    model = make_model("convnet-1-4")
    torch.save(model.state_dict(), tmp_path / "init.pt")
    run(root, tmp_path / "run", "--init", str(tmp_path / "init.pt"), "--lr", "0")
    final = torch.load(tmp_path / "run" / "final.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(final[name], tensor)


def test_the_optimizer_can_be_chosen(tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    recipes = {}
    for name in ("sgd", "adam"):
        run(root, tmp_path / name, "--optimizer", name)
        saved = torch.load(tmp_path / name / "last.pt", weights_only=True)
        recipes[name] = json.loads(saved["recipe"])["optimizer"]
        assert ("exp_avg" in saved["optimizer"]["state"][0]) == (name == "adam")
    assert recipes == {"sgd": "sgd", "adam": "adam"}
