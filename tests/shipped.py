"""Functions that are sent to another process by cloudpickle, as Ray, Dask and submitit do."""

import pickle

import cloudpickle
import jax
import numpy as np
from processes import run_python

_WORKER = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    functions = pickle.load(file)
results = {}
for name, function in functions.items():
    try:
        results[name] = pickle.dumps(function())
    except Exception as error:
        results[name] = pickle.dumps(f"{type(error).__name__}: {error}")
with open(sys.argv[2], "wb") as file:
    pickle.dump(results, file)
"""


def results_of(functions, folder):
    """The arrays that functions of no arguments return in another process, and here. An error is its message."""
    sent, returned = folder / "sent", folder / "returned"
    arrays = {name: lambda f=f: list(map(np.asarray, jax.tree.leaves(f()))) for name, f in functions.items()}
    sent.write_bytes(cloudpickle.dumps(arrays))
    run_python("-c", _WORKER, sent, returned)
    there = {name: pickle.loads(x) for name, x in pickle.loads(returned.read_bytes()).items()}
    return there, {name: f() for name, f in arrays.items()}
