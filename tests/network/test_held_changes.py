"""Changes that several calls share: made once, undone by the last."""

import threading

import pytest

from laplace_debias.network.preserve import Change, held


def lamp():
    """A switch, the change that turns it on, and a record of what was done."""
    state, done = {"on": False}, []

    def make():
        before, state["on"] = state["on"], True
        done.append("on")

        def undo():
            state["on"] = before
            done.append("off")

        return undo

    return state, Change(("lamp", id(state)), make), done


def test_overlapping_calls_in_two_threads_put_back_what_the_first_found():
    """The first call ends while the second still runs: the change must outlast it."""
    state, change, done = lamp()
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def second():
        with held([change]):
            entered.set()
            leave.wait(5)
            seen.append(state["on"])

    thread = threading.Thread(target=second)
    with held([change]):
        thread.start()
        assert entered.wait(5)
    assert state["on"]  # the second call still needs it
    leave.set()
    thread.join()
    assert seen == [True] and not state["on"] and done == ["on", "off"]


def test_changes_are_undone_after_an_error_also_in_the_middle_of_making_them():
    state, change, done = lamp()

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), held([change, Change("broken", broken)]):
        raise AssertionError("the block must not start")
    assert not state["on"] and done == ["on", "off"]
    with pytest.raises(KeyError), held([change]):
        raise KeyError
    assert not state["on"]
