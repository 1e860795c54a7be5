"""Cells that are made once: resuming, refusing what belongs elsewhere, and sharing a folder."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from laplace_debias.storage.cells import CellStore


def never():
    raise AssertionError("made again")


def test_cells_are_made_once_and_come_back(tmp_path):
    content = {
        "numbers": (1, 0.1, float("inf"), None),
        "tensors": [torch.eye(2, dtype=torch.float64), torch.tensor([3])],
    }
    for folder in (None, tmp_path):
        store = CellStore(folder, {"a": 1})
        made = store.get("with tensors", lambda: content)
        assert made["numbers"] == [1, 0.1, float("inf"), None]
        assert store.get("with tensors", never) is made
        assert store.get("without", lambda: [1.5]) == [1.5]
        assert list(store) == ["with tensors", "without"]
        assert "without" in store and "other" not in store
    again = CellStore(tmp_path, {"a": 1})
    back = again.get("with tensors", never)
    assert back["numbers"] == made["numbers"]
    for tensor, expected in zip(back["tensors"], content["tensors"], strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    assert again["without"] == [1.5]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "with tensors.npz", "without.json"}
    with pytest.raises(KeyError, match="got 'other', which is not there"):
        again["other"]


def test_tensors_come_back_on_the_cpu_and_without_graph():
    weight = nn.Parameter(torch.ones(2))
    kept = CellStore(None, {}).get("a", lambda: weight)
    assert torch.equal(kept, torch.ones(2)) and not kept.requires_grad


@pytest.mark.parametrize("name", ["a/b", "../up", "50 %", "crossfit-64-0", "ä", "a.json"])
def test_any_name_is_a_file_of_the_folder(name, tmp_path):
    store = CellStore(tmp_path / "cells", {})
    store.put(name, 1)
    assert list(CellStore(tmp_path / "cells", {})) == [name]
    assert [path.name for path in tmp_path.iterdir()] == ["cells"]
    assert CellStore(tmp_path / "cells", {}).get(name, never) == 1


def test_the_configurations_name_is_taken(tmp_path):
    with pytest.raises(ValueError, match="another name of a cell than 'config'.*Remedy"):
        CellStore(tmp_path, {}).put("config", 1)


def test_another_configuration_is_refused_and_named(tmp_path):
    config = {"seed": 0, "data": {"train": "x", "test": "y"}, "options": {"k": [1, 2]}}
    CellStore(tmp_path, config)
    CellStore(tmp_path, config | {"seed": 0.0, "options": {"k": (1, 2)}})  # the same numbers
    with pytest.raises(ValueError, match=r"\(seed: 0 there, 1 now\). Remedy") as error:
        CellStore(tmp_path, config | {"seed": 1})
    assert str(tmp_path) in str(error.value) and "data_id" not in str(error.value)
    with pytest.raises(ValueError, match=r"options.k: \[1, 2\] there, \[1\] now"):
        CellStore(tmp_path, config | {"options": {"k": [1]}})
    with pytest.raises(ValueError, match=r"\(data.test: 'y' there, 'z' now\).*`data_id=`"):
        CellStore(tmp_path, config | {"data": {"train": "x", "test": "z"}})
    with pytest.raises(ValueError, match="more: None there, 1 now"):
        CellStore(tmp_path, config | {"more": 1})


def test_equal_configurations_share_cells_whatever_their_types(tmp_path):
    CellStore(tmp_path, {"seed": 0}).put("x", 1)
    assert CellStore(tmp_path, {"seed": 0.0}).get("x", never) == 1


def test_foreign_cells_are_refused(tmp_path):
    store = CellStore(tmp_path, {"a": 1})
    assert store.get("x", lambda: [1.5]) == [1.5]
    cell = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(cell | {"fingerprint": "other"}))
    with pytest.raises(ValueError, match="of another .other.. Remedy: delete it"):
        CellStore(tmp_path, {"a": 1}).get("x", never)
    (tmp_path / "x.json").write_text("[1.5]")
    with pytest.raises(ValueError, match=r"x\.json without. Remedy: delete this file"):
        CellStore(tmp_path, {"a": 1}).get("x", never)


def test_cells_of_other_settings_are_refused(tmp_path):
    settings = {"dtype": "float64"}
    CellStore(tmp_path, {}).put("x", 1, settings)
    assert CellStore(tmp_path, {}).get("x", never, settings) == 1
    for other in (None, {"dtype": "float32"}):
        with pytest.raises(ValueError, match="Expected a cell made with the settings .*x.json"):
            CellStore(tmp_path, {}).get("x", never, other)
    assert CellStore(tmp_path)["x"] == 1  # to look at it


def test_looking_at_a_folder_needs_no_configuration(tmp_path):
    CellStore(tmp_path, {"n": 3}).put("x", 1)
    seen = CellStore(tmp_path)
    assert seen.config == {"n": 3} and {name: seen[name] for name in seen} == {"x": 1}


@pytest.mark.parametrize("content", [{"a": list(range(99))}, {"a": torch.arange(99.0)}])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_a_cut_cell_is_named_with_the_remedy(content, kept, tmp_path):
    CellStore(tmp_path, {}).put("x", content)
    (path,) = (path for path in tmp_path.iterdir() if path.stem == "x")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(
        ValueError, match="Expected a whole file.*Remedy: delete this file"
    ) as error:
        CellStore(tmp_path, {}).get("x", never)
    assert str(path) in str(error.value)
    path.unlink()
    assert CellStore(tmp_path, {}).get("x", lambda: 2) == 2


def test_a_cut_configuration_is_named_with_the_remedy(tmp_path):
    CellStore(tmp_path, {"a": 1})
    (tmp_path / "config.json").write_text('{"a"')
    with pytest.raises(ValueError, match=r"config\.json, which cannot be read.*Remedy"):
        CellStore(tmp_path, {"a": 1})


def test_a_failed_write_leaves_the_finished_cells(tmp_path, monkeypatch):
    store = CellStore(tmp_path, {})
    store.put("a", torch.ones(1))

    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("numpy.savez_compressed", fail)
        with pytest.raises(OSError, match="disk full"):
            store.put("b", torch.ones(1))
    kept = CellStore(tmp_path, {})
    assert list(kept) == ["a"]
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "a.npz"}


def test_unwritable_content_says_so(tmp_path):
    with pytest.raises(TypeError, match="Expected numbers, strings.*Remedy"):
        CellStore(tmp_path, {}).put("x", {"a": object()})
    assert "x" not in CellStore(tmp_path, {})


def test_threads_write_one_cell_at_the_same_time(tmp_path):
    stores = [CellStore(tmp_path, {}) for _ in range(8)]
    start, errors = threading.Barrier(len(stores), timeout=60), []

    def work(store, number):
        try:
            start.wait()
            for turn in range(20):
                store.put(f"cell {turn}", {"values": [number] * 200})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(stores, range(8))]  # noqa: B905
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    seen = CellStore(tmp_path, {})
    assert len(list(seen)) == 20
    for name in seen:
        assert len(set(seen[name]["values"])) == 1 and len(seen[name]["values"]) == 200
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


WORKER = """
import sys, time
from pathlib import Path
from laplace_debias.storage.cells import CellStore
folder, number = Path(sys.argv[1]), int(sys.argv[2])
store = CellStore(folder / "cells", {"seed": 0})
(folder / f"ready-{number}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
for turn in range(60):
    store.put("cell", {"values": [number] * 3000})
"""


def test_two_processes_write_one_cell_at_the_same_time(tmp_path):
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(number)])
        for number in range(2)
    ]
    try:
        while not all((tmp_path / f"ready-{number}").exists() for number in range(2)):
            assert all(worker.poll() is None for worker in workers)
        (tmp_path / "go").touch()
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    values = CellStore(tmp_path / "cells", {"seed": 0}).get("cell", never)["values"]
    assert len(values) == 3000 and len(set(values)) == 1
    names = {path.name for path in (tmp_path / "cells").iterdir()}
    assert names == {"config.json", "cell.json"}


def test_without_a_folder_no_data_are_read():
    class Unread:
        def __iter__(self):
            raise AssertionError("read")

    store = CellStore.for_run(None, nn.Linear(1, 1), {"train": Unread()})
    assert store.get("a", lambda: 1) == 1


def test_a_run_is_recognised_by_its_fingerprint(tmp_path):
    model, data = nn.Linear(1, 1), {"train": (torch.zeros(2, 1), torch.zeros(2))}
    run = dict(loss=nn.MSELoss(), options={"k": 1})
    CellStore.for_run(tmp_path, model, data, **run).put("a", 1)
    assert CellStore.for_run(tmp_path, model, data, **run).get("a", never) == 1
    with pytest.raises(ValueError, match="options.k: 1 there, 2 now"):
        CellStore.for_run(tmp_path, model, data, loss=nn.MSELoss(), options={"k": 2})
