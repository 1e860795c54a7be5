"""The CIFAR example: its networks, its reader and its trainer, on tiny made files."""

import importlib
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar10"


@pytest.fixture(scope="module")
def example():
    """The example's modules by name, imported as its scripts import them."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in ("models", "data", "train")}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in ("models", "data", "train"):
            sys.modules.pop(name, None)


def write(folder, name, n, seed, num_classes=10, key=b"labels"):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
    labels = rng.integers(0, num_classes, n).tolist()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "wb") as file:
        pickle.dump({b"data": data, key: labels}, file)
    return data, labels


@pytest.fixture
def tiny_cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    parts = [write(folder, f"data_batch_{i}", 6, seed=i) for i in range(1, 6)]
    test = write(folder, "test_batch", 4, seed=6)
    return tmp_path, parts, test


def count(parameters):
    return sum(p.numel() for p in parameters)


def test_all_cnn_c_has_the_papers_size(example):
    models = example["models"]
    model = models.all_cnn_c()
    weights, biases = models.weights_and_biases(model)
    assert count(model.parameters()) == 1_369_738
    assert count(weights) == 1_368_480
    assert count(biases) == 1_369_738 - 1_368_480
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert count(models.all_cnn_c(100).parameters()) == 1_387_108  # the paper's CIFAR-100 model
    assert not any(isinstance(module, torch.nn.Dropout) for module in model)
    convolutions = [i for i, module in enumerate(model) if isinstance(module, torch.nn.Conv2d)]
    assert convolutions == list(range(0, 17, 2))


@pytest.mark.parametrize(("depth", "width"), [(1, 32), (4, 64), (7, 128)])
def test_conv_net_family(example, depth, width):
    model = example["models"].make_model(f"convnet-{depth}-{width}")
    expected = (3 * 25 * width + width) + depth * (25 * width**2 + width) + (640 * width + 10)
    assert count(model.parameters()) == expected
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_unknown_models_are_named(example):
    with pytest.raises(ValueError, match="Unknown model 'convnet-4'"):
        example["models"].make_model("convnet-4")
    with pytest.raises(ValueError, match="width >= 1"):
        example["models"].conv_net(1, 0)


def test_reader_splits_and_normalises(example, tiny_cifar10):
    data = example["data"]
    root, parts, test = tiny_cifar10
    cifar = data.load_cifar(root, validation_size=7)
    assert (len(cifar.train), len(cifar.validation), len(cifar.test)) == (23, 7, 4)
    pixels = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
    labels = sum((part[1] for part in parts), [])
    assert cifar.validation.labels.tolist() == labels[23:]
    assert cifar.test.labels.tolist() == test[1]
    X, y = cifar.train.to_dataset()[5]
    assert y == labels[5]
    expected = (pixels[5, 1] / 255 - 0.4822) / 0.2435  # the green channel
    np.testing.assert_allclose(X[1].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_reader_of_cifar100(example, tmp_path):
    folder = tmp_path / "cifar-100-python"
    write(folder, "train", 9, 0, 100, b"fine_labels")
    _, labels = write(folder, "test", 3, 1, 100, b"fine_labels")
    cifar = example["data"].load_cifar(tmp_path, "cifar100", validation_size=4)
    assert (len(cifar.train), len(cifar.validation), cifar.num_classes) == (5, 4, 100)
    assert cifar.test.labels.tolist() == labels


def test_reader_says_what_is_wrong(example, tiny_cifar10):
    load = example["data"].load_cifar
    root, *_ = tiny_cifar10
    with pytest.raises(ValueError, match="Unknown data set 'mnist'"):
        load(root, "mnist")
    with pytest.raises(ValueError, match="leaves none of the 30"):
        load(root, validation_size=30)
    with pytest.raises(FileNotFoundError, match="cifar-100-python"):
        load(root, "cifar100")
    write(root / "cifar-10-batches-py", "test_batch", 4, 0, num_classes=100)
    with pytest.raises(ValueError, match="expected 0 to 9"):
        load(root, validation_size=7)


def test_batches_shuffle_and_flip_by_generator(example, tiny_cifar10):
    root, *_ = tiny_cifar10
    split = example["data"].load_cifar(root, validation_size=7).train

    def pixels(seed, flip):
        generator = torch.Generator().manual_seed(seed)
        return torch.cat([X for X, _ in split.batches(8, generator, flip)])

    assert torch.equal(pixels(0, True), pixels(0, True))
    assert not torch.equal(pixels(0, False), pixels(1, False))
    before = split.images.clone()
    for image in pixels(0, True):
        known = example["data"].normalise(split.images)
        assert (known == image).flatten(1).all(1).any() or (known.flip(-1) == image).flatten(1).all(
            1
        ).any()
    assert torch.equal(split.images, before)
    with pytest.raises(ValueError, match="pass a torch.Generator"):
        next(split.batches(8, flip=True))


def test_checkpoints_are_log_spaced(example):
    epochs = example["train"].checkpoint_epochs(350)
    assert epochs == [1, 2, 4, 7, 14, 26, 50, 95, 183, 350]
    assert example["train"].checkpoint_epochs(12)[-1] == 12
    assert len(set(example["train"].checkpoint_epochs(12))) == 10
    assert example["train"].checkpoint_epochs(3) == [1, 2, 3]


def test_the_papers_recipe(example):
    train = example["train"]
    recipe = train.paper_recipe("allcnnc", "cifar10")
    rates = [train.learning_rate(recipe, epoch, 0, 10) for epoch in (0, 199, 200, 250, 349)]
    assert rates == pytest.approx([0.025, 0.025, 0.0025, 0.00025, 0.000025])
    optimizer = train.make_optimizer(example["models"].all_cnn_c(), recipe)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [9, 9]
    short = train.short_recipe(recipe)
    ends = train.learning_rate(short, 0, 0, 5), train.learning_rate(short, short.epochs - 1, 4, 5)
    assert ends == pytest.approx((0.01, 0.0001))


def run(example, root, out, *more):
    flags = f"--data {root} --out {out} --model convnet-1-4 --epochs 3 --batch-size 8 --seed 3"
    return example["train"].main([*flags.split(), "--validation-size", "7", "--flip", *more])


def test_an_interrupted_run_ends_like_an_uninterrupted_one(example, tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    state = torch.get_rng_state()
    history = run(example, root, whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(run(example, root, parts, "--max-epochs", "1")) == 1
    assert not (parts / "final.pt").exists()
    assert run(example, root, parts, "--max-epochs", "1")[:1] == history[:1]
    assert run(example, root, parts) == history
    expected = torch.load(whole / "final.pt", weights_only=True)
    for name, tensor in torch.load(parts / "final.pt", weights_only=True).items():
        assert torch.equal(tensor, expected[name]), name
    assert sorted(path.name for path in parts.glob("epoch_*.pt")) == [
        f"epoch_000{i}.pt" for i in (1, 2, 3)
    ]
    assert "3 of 3" not in (whole / "train.log").read_text()
    run(example, root, whole)  # nothing left to do
    assert "3 of 3 epochs done" in (whole / "train.log").read_text()


def test_a_folder_of_another_recipe_is_refused(example, tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    run(example, root, tmp_path / "run", "--max-epochs", "1")
    with pytest.raises(ValueError, match=r"lr: 0.001 there, 0.5 now"):
        run(example, root, tmp_path / "run", "--lr", "0.5")


def test_training_starts_from_given_weights(example, tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    torch.manual_seed(11)
    model = example["models"].make_model("convnet-1-4")
    torch.save(model.state_dict(), tmp_path / "init.pt")
    run(example, root, tmp_path / "run", "--init", str(tmp_path / "init.pt"), "--lr", "0")
    final = torch.load(tmp_path / "run" / "final.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(final[name], tensor)


def test_the_optimizer_can_be_chosen(example, tiny_cifar10, tmp_path):
    root, *_ = tiny_cifar10
    recipes = {}
    for name in ("sgd", "adam"):
        run(example, root, tmp_path / name, "--optimizer", name)
        saved = torch.load(tmp_path / name / "last.pt", weights_only=True)
        recipes[name] = json.loads(saved["recipe"])["optimizer"]
        assert ("exp_avg" in saved["optimizer"]["state"][0]) == (name == "adam")
    assert recipes == {"sgd": "sgd", "adam": "adam"}
