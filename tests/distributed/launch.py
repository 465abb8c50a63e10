"""Starting the processes of worker.py."""

import json
import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen

from processes import environment

STEPS = 10


def start(processes, *, devices, checkpoints=""):
    """The processes, each with its own CPU devices, which together are `devices`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        args = processes, s.getsockname()[1], STEPS, checkpoints
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    options = {"env": environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"), "text": True, "stdout": PIPE, "stderr": PIPE}
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), *map(str, args)]
    return [Popen([*command, str(i)], **options) for i in range(processes)]


def finish(workers):
    """The steps of each process, and the final parameters and state that each of them sees."""
    outputs = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs[-1][1]
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith(('{"', "[["))] for out, _ in outputs]
    return [found[:-1] for found in lines], [found[-1] for found in lines]
