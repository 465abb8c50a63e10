"""Starting the processes of worker.py."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from processes import environment

STEPS = 10


def start(processes, *, devices, checkpoints=None):
    """The processes, each with its own CPU devices, which together are `devices`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    args = ["--processes", processes, "--port", port, "--steps", STEPS]
    args += ["--checkpoints", checkpoints] if checkpoints else []
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), *map(str, args), "--process"]
    options = {"env": environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"), "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [subprocess.Popen([*command, str(i)], **options, **pipes) for i in range(processes)]


def finish(workers):
    """The steps of each process, and the final parameters and state that each of them sees."""
    outputs = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs[-1][1]
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith(('{"', "[["))] for out, _ in outputs]
    return [found[:-1] for found in lines], [found[-1] for found in lines]
