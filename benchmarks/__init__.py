"""Benchmarks of jamp beside its peers: `python -m benchmarks --help`."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # before jax loads libtpu: there is no TPU to ask about
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
