"""Files that appear whole or not at all."""

import threading

import pytest

from laplace_debias.storage.atomic import write_atomically


def test_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "result.txt"
    write_atomically(path, lambda file: file.write_text("old"))

    def fail(file):
        file.write_text("half")
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "cell.json"
    both_wrote = threading.Barrier(2, timeout=30)
    errors = []

    def work(text):
        def write(file):
            file.write_text(text)
            both_wrote.wait()  # neither moves its file before the other has written

        try:
            write_atomically(path, write)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(text,)) for text in ("a" * 9, "b" * 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert path.read_text() in ("a" * 9, "b" * 9)
    assert list(tmp_path.iterdir()) == [path]
