"""The figures on mini-batch quadratics run at a small size, and resume."""

import pytest
import torch

from examples import quadratic_problems
from examples.cifar10 import quadratics
from examples.networks import make_model
from laplace_debias.quadratics import Quadratic
from tests.examples.cifar_files import write_cifar10, write_cifar100


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_it_runs_and_resumes(tmp_path, data, capsys, monkeypatch):
    load = quadratic_problems.load_cifar
    monkeypatch.setattr(quadratic_problems, "load_cifar", lambda *a: load(*a, validation_size=4))
    (write_cifar10 if data == "cifar10" else write_cifar100)(tmp_path, 12, 4)
    torch.manual_seed(0)
    model = make_model("convnet-0-2", 10 if data == "cifar10" else 100)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    flags = f"--data {data} --root {tmp_path} --checkpoint {tmp_path / 'state.pt'} --name tiny"
    flags += " --model convnet-0-2 --batch-size 2 --mini-batches 4 --draws 2 --k 2 --k-cg 2"
    flags += f" --out {tmp_path}"
    found = quadratics.main(flags.split())
    first = capsys.readouterr().out
    eigen, cg = found["eigenvectors"], found["cg"]
    assert len(eigen["curvature, same"]) == len(cg["curvature, same"]) == 2
    assert eigen["curvature, same / others"][0] > 1
    weight = torch.tensor(found["overlaps"]["weight in the other's top space"])
    assert torch.allclose(weight.diagonal(), torch.ones(2), atol=1e-3)
    folder = tmp_path / "quadratics-tiny"
    names = {path.stem for path in folder.glob("*.png")}
    assert names == {"bias_eigenvectors", "bias_cg", "cg_magnitudes", "overlaps"}

    def again(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(Quadratic, "__matmul__", again)
    monkeypatch.setattr(Quadratic, "restrict", again)
    quadratics.main(flags.split())
    assert capsys.readouterr().out == first
