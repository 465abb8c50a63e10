"""A job of several processes that dies and is started again from its Orbax checkpoint with another number of them."""

import signal

import numpy as np
import pytest
from distributed.launch import STEPS, finish, start


@pytest.mark.slow
def test_a_killed_job_goes_on_with_other_processes_and_ends_as_if_undisturbed(tmp_path):
    undisturbed, expected = finish(start(1, devices=4, checkpoints=tmp_path / "undisturbed"))
    workers = start(2, devices=4, checkpoints=tmp_path / "killed")
    while '"step": 6' not in workers[1].stdout.readline():  # after the checkpoint of step 6, amid the next steps
        assert workers[1].poll() is None, workers[1].stderr.read()
    workers[1].send_signal(signal.SIGKILL)
    assert workers[1].wait() == -signal.SIGKILL
    for worker in workers:  # the others cannot go on, and wait
        worker.kill()
        worker.communicate()

    steps, final = finish(start(4, devices=4, checkpoints=tmp_path / "killed"))
    assert 6 <= steps[0][0]["step"] <= 8 < steps[0][-1]["step"] == STEPS - 1
    decided = lambda step: [step[name] for name in ("loss_scale", "grads_finite", "finite_steps", "overflow_steps")]
    for mine, found in zip(steps, final, strict=True):
        assert [*map(decided, mine)] == [*map(decided, undisturbed[0])][-len(mine) :]
        for x, y in zip(found, expected[0], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
