"""Real processes, which speak over the loopback address."""

import pytest
from distributed.launch import STEPS, finish, start


@pytest.mark.slow
def test_processes_take_the_same_decision_at_every_step():
    """Two. Four do in integrations/test_processes.py."""
    processes = 2
    steps, final = finish(start(processes, devices=4))
    local = [[step.pop("my batch is finite") for step in mine] for mine in steps]
    assert steps == [steps[0]] * processes
    assert final == [final[0]] * processes
    expected = [step % 4 != 2 for step in range(STEPS)]
    assert [step["grads_finite"] for step in steps[0]] == expected
    assert local == [[True] * STEPS] * (processes - 1) + [expected]  # the overflow is on the last process alone
    assert [step["overflow_steps"] for step in steps[0]][-1] == expected.count(False) == 2
