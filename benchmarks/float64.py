"""Code in float64 on this machine: with products in float32, and in float32 throughout.

    python -m benchmarks.float64 --json docs/benchmarks/float64.json      five processes a problem, one after the other
    python -m benchmarks.float64 --target h200 --only "energies and forces" "Kalman filter"      as compiled, in bytes
    python -m benchmarks.float64 --target tpu --only PINN       the same, where the compiler takes float64 programs

A problem is a program that is written in float64: a network with forces, Gaussian processes, a Kalman filter and a
smoother, a network that solves a differential equation (PINN), a neural ODE, a tangent kernel (NTK), Hamiltonian
Monte Carlo and an implicit layer. The speed is beside float64, pair by pair, and the error is that of the result. It
is relative, by the norm over all arrays of the result. A problem whose library is not installed is left out.
"""

import functools
import importlib.util
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

import jamp
from benchmarks import hlo
from benchmarks.ahead_of_time import TARGETS, compiled, is_installed
from benchmarks.record import Rows, parser, record, show, write
from benchmarks.timing import Case, across, compare
from jamp._jaxprs import ir, walk
from jamp._jaxprs.primitives import PRODUCTS as PRODUCT_NAMES

FLOAT64, AGAIN, PRODUCTS, KEPT, FLOAT32 = (
    "float64",
    "float64, again",
    "products in float32",
    "products in float32, recompute=False",
    "float32",
)
Cast = Callable[[Callable[..., Any]], Callable[..., Any]]  # what is done to the function that is differentiated


class Problem(NamedTuple):
    """A program: `fun(carry, *args)` is its result, and `carry` the arrays that a step of it changes."""

    fun: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...] = ()


def normal(*shape: int, seed: int = 0) -> Any:
    """Random numbers, divided by the root of the first size."""
    return np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5


def mlp(weights: Any, x: Any) -> Any:
    *hidden, last = weights
    for w in hidden:
        x = jnp.tanh(x @ w)
    return x @ last


def layers(width: int, inputs: int, outputs: int, count: int) -> list[Any]:
    sizes = [inputs, *[width] * count, outputs]
    return [normal(m, n, seed=i) for i, (m, n) in enumerate(itertools.pairwise(sizes))]


def forces(cast: Cast, quick: bool) -> Problem:
    """The gradient of a loss of energies and forces, of a network of four layers."""
    width, batch = (16, 8) if quick else (256, 1024)

    def energy(x: Any, weights: Any) -> Any:
        return jnp.sum(mlp(weights, x))

    def loss(weights: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(energy)(x, weights)
        return (value / batch) ** 2 + jnp.mean(gradient**2)

    return Problem(jax.grad(cast(loss)), layers(width, width, 1, 3), (normal(batch, width, seed=9) * batch**0.5,))


def distances(x: Any, y: Any) -> Any:
    """The squares of the distances of rows, by a product, as kernels are usually computed."""
    return jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1) - 2 * x @ y.T


def gaussian_process(cast: Cast, quick: bool) -> Problem:
    """The gradient of the marginal likelihood in the length scales and the noise."""
    n = 32 if quick else 768
    x, y = normal(n, 8) * n**0.5, normal(n, seed=1) * n**0.5

    def loss(log: Any, x: Any, y: Any) -> Any:
        z = x * jnp.exp(log[:8])
        kernel = jnp.exp(-distances(z, z) / 2) + (1e-2 + jnp.exp(log[8])) * jnp.eye(n, dtype=x.dtype)
        factor = jnp.linalg.cholesky(kernel)
        return y @ cho_solve((factor, True), y) / 2 + jnp.sum(jnp.log(jnp.diag(factor)))

    return Problem(jax.grad(cast(loss)), np.full(9, -1.0), (x, y))


def sparse_gaussian_process(cast: Cast, quick: bool) -> Problem:
    """The gradient of the evidence bound of Titsias (2009) in the inducing points."""
    n, m = (64, 16) if quick else (8192, 256)
    x, y = normal(n, 8) * n**0.5, normal(n, seed=1) * n**0.5

    def loss(z: Any, x: Any, y: Any) -> Any:
        one = jnp.eye(m, dtype=x.dtype)
        factor = jnp.linalg.cholesky(jnp.exp(-distances(z, z) / 8) + 1e-4 * one)
        a = solve_triangular(factor, jnp.exp(-distances(z, x) / 8), lower=True) * 3
        outer = jnp.linalg.cholesky(a @ a.T + one)
        c = solve_triangular(outer, a @ y, lower=True) * 3
        return jnp.sum(jnp.log(jnp.diag(outer))) + (y @ y * 9 - c @ c) / 2 + (9 * n - jnp.sum(a * a)) / 2

    return Problem(jax.grad(cast(loss)), x[:m].copy(), (x, y))


def kalman(cast: Cast, quick: bool, smooth: bool = False) -> Problem:
    """The gradient of the likelihood of a Kalman filter, or of the squared states of a smoother, in the transition."""
    d, steps = (8, 3) if quick else (128, 40)
    observe, ys = normal(d, d, seed=1), normal(steps, d, seed=2) * steps**0.5

    def loss(f: Any, h: Any, ys: Any) -> Any:
        one = jnp.eye(d, dtype=f.dtype)

        def step(carry: Any, y: Any) -> Any:
            m, p = f @ carry[0], f @ carry[1] @ f.T + one
            factor = jnp.linalg.cholesky(h @ p @ h.T + one)
            gain, r = cho_solve((factor, True), h @ p).T, y - h @ m
            after = m + gain @ r, p - gain @ (h @ p)
            whitened = solve_triangular(factor, r, lower=True)
            return after, (whitened @ whitened / 2 + jnp.sum(jnp.log(jnp.diag(factor))), (m, p), after)

        def back(carry: Any, x: Any) -> Any:
            (m, p), (m0, p0) = x  # predicted, and filtered before
            gain = jnp.linalg.solve(p, f @ p0).T
            m1, p1 = m0 + gain @ (carry[0] - m), p0 + gain @ (carry[1] - p) @ gain.T
            return (m1, p1), jnp.sum(m1**2) + jnp.trace(p1)

        last, (losses, predicted, filtered) = lax.scan(step, (jnp.zeros(d, f.dtype), one), ys)
        if not smooth:
            return jnp.sum(losses)
        pairs = jax.tree.map(lambda x: x[1:], predicted), jax.tree.map(lambda x: x[:-1], filtered)
        return jnp.mean(lax.scan(back, last, pairs, reverse=True)[1])

    return Problem(jax.grad(cast(loss)), normal(d, d) * 0.9, (observe, ys))


def pinn(cast: Cast, quick: bool) -> Problem:
    """The gradient of the residual of u_t + u u_x = u_xx / 100, which has second derivatives of the network."""
    width, points = (8, 4) if quick else (128, 2048)

    def residual(weights: Any, point: Any) -> Any:
        u = lambda point: mlp(weights, point)[0]
        along = jnp.array([1.0, 0.0], point.dtype)
        u_x = lambda point: jax.jvp(u, (point,), (along,))[1]
        u_xx = jax.jvp(u_x, (point,), (along,))[1]
        return jax.grad(u)(point)[1] + u(point) * u_x(point) - u_xx / 100

    def loss(weights: Any, points: Any) -> Any:
        return jnp.mean(jax.vmap(residual, (None, 0))(weights, points) ** 2)

    return Problem(jax.grad(cast(loss)), layers(width, 2, 1, 4), (normal(points, 2, seed=9) * points**0.5,))


def ode(cast: Cast, quick: bool) -> Problem:
    """The gradient of a neural ODE, by Diffrax: Tsit5 with a relative tolerance of 1e-6."""
    import diffrax

    width, batch = (8, 4) if quick else (256, 128)

    def loss(weights: Any, x: Any) -> Any:
        field = cast(lambda t, y, weights: mlp(weights, y))
        start, end = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            start,
            end,
            end / 64,
            x,
            weights,
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
            max_steps=256,
        )
        return jnp.mean(solution.ys**2)

    x = normal(batch, width, seed=9) * batch**0.5
    return Problem(jax.grad(loss), layers(width, width, width, 2), (x,))


def tangent_kernel(cast: Cast, quick: bool) -> Problem:
    """Predictions by the tangent kernel of a network: Jacobians, their product, and a solve."""
    width, n = (8, 8) if quick else (128, 256)

    def predict(weights: Any, x: Any, y: Any) -> Any:
        one = lambda point: jax.grad(lambda w: mlp(w, point)[0])(weights)
        jacobians = jax.tree.leaves(jax.vmap(one)(x))
        flat = jnp.concatenate([j.reshape(len(x), -1) for j in jacobians], 1)
        kernel = flat @ flat.T
        train = kernel[: n // 2, : n // 2]
        ridge = 1e-4 * jnp.trace(train) / n * jnp.eye(n // 2, dtype=x.dtype)
        return kernel[n // 2 :, : n // 2] @ cho_solve((jnp.linalg.cholesky(train + ridge), True), y)

    x, y = normal(n, 16, seed=9) * n**0.5, normal(n // 2, seed=10)
    return Problem(cast(predict), layers(width, 16, 1, 3), (x, y))


def hmc(cast: Cast, quick: bool) -> Problem:
    """Two samples of a logistic regression by NumPyro's Hamiltonian Monte Carlo, of 16 steps each."""
    from numpyro.infer.hmc import hmc as make

    n, d = (32, 4) if quick else (20_000, 64)
    x, labels = normal(n, d) * n**0.5, np.sign(normal(n, seed=1))

    def run(position: Any, x: Any, labels: Any) -> Any:
        def potential(w: Any) -> Any:
            return jnp.sum(jax.nn.softplus(-labels * (x @ w))) + jnp.sum(w**2) / 2

        init, sample = make(cast(potential), algo="HMC")
        state = init(
            position,
            num_warmup=0,
            step_size=1e-3,
            adapt_step_size=False,
            adapt_mass_matrix=False,
            num_steps=16,
            trajectory_length=None,
            rng_key=jax.random.key(0),
        )
        for _ in range(2):
            state = sample(state)
        return state.z

    return Problem(run, np.zeros(d), (x, labels))


def implicit_layer(cast: Cast, quick: bool) -> Problem:
    """The gradient of a fixed point z = tanh(z W + x), by the implicit function theorem and GMRES."""
    width, batch = (8, 4) if quick else (256, 64)

    def loss(w: Any, x: Any) -> Any:
        layer = lambda z, w: jnp.tanh(z @ w + x)
        z = lax.stop_gradient(lax.fori_loop(0, 60, lambda i, z: layer(z, w), jnp.zeros_like(x)))
        update = layer(z, w)  # whose derivative in w is that of the layer
        pull_back = jax.linearize(lambda z: layer(z, lax.stop_gradient(w)), z)[1]
        solve = functools.partial(jax.scipy.sparse.linalg.gmres, tol=1e-8, restart=20, maxiter=2)
        exact = lax.custom_linear_solve(
            lambda v: v - pull_back(v),
            update - z,
            lambda matvec, b: solve(matvec, b)[0],
            lambda vecmat, b: solve(vecmat, b)[0],
        )
        return jnp.mean((z + exact) ** 2)

    x = normal(batch, width, seed=9) * batch**0.5
    return Problem(jax.grad(cast(loss)), normal(width, width) / 2, (x,))


PROBLEMS: dict[str, Callable[[Cast, bool], Problem]] = {
    "energies and forces": forces,
    "PINN": pinn,
    "Gaussian process": gaussian_process,
    "sparse Gaussian process": sparse_gaussian_process,
    "Kalman filter": kalman,
    "Kalman smoother": functools.partial(kalman, smooth=True),
    "neural ODE (Diffrax)": ode,
    "tangent kernel": tangent_kernel,
    "HMC (NumPyro)": hmc,
    "implicit layer": implicit_layer,
}
DTYPES = dict.fromkeys((FLOAT64, AGAIN, PRODUCTS, KEPT), np.float64) | {FLOAT32: np.float32}
LIBRARIES = {"neural ODE (Diffrax)": "diffrax", "HMC (NumPyro)": "numpyro"}
CASTS: dict[str, Cast] = {
    FLOAT64: lambda fun: fun,
    AGAIN: lambda fun: fun,
    PRODUCTS: lambda fun: jamp.autocast(fun, jnp.float32, recompute=True),
    KEPT: lambda fun: jamp.autocast(fun, jnp.float32, recompute=False),
    FLOAT32: lambda fun: fun,
}


def cases(name: str, quick: bool) -> list[Case]:
    """Each way to compute a problem."""
    jax.config.update("jax_enable_x64", True)
    made = []
    for how, cast in CASTS.items():
        fun, carry, args = PROBLEMS[name](cast, quick)
        arrays = jax.tree.map(lambda x, dtype=DTYPES[how]: jnp.asarray(x, dtype), (carry, args))
        made.append(Case(how, _in_dtype(fun, DTYPES[how] == np.float64), *arrays))
    return made


def errors(name: str, quick: bool) -> dict[str, float]:
    """The error of the result of each way, beside that of float64."""
    different = [case for case in cases(name, quick) if case.name != AGAIN]
    results = {case.name: _flat(jax.jit(case.step)(case.carry, *case.args)) for case in different}
    exact = results[FLOAT64]
    return {how: float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) for how, x in results.items()}


def times(name: str, quick: bool) -> Rows:
    """The time of each way, beside that of float64."""
    steps = [Case(case.name, _step(case.step), case.carry, case.args) for case in cases(name, quick)]
    return compare(steps, 1 if quick else 9)


def bytes_on(target: str, name: str, quick: bool) -> Rows:
    """The bytes that each way moves on a device that is not there, and its products by dtype."""
    rows: Rows = []
    for case in [case for case in cases(name, quick) if case.name != AGAIN]:
        try:
            counted = hlo.count(compiled(target, case.step, case.carry, *case.args).as_text())
        except jax.errors.JaxRuntimeError as error:  # XLA:TPU has no float64 form of what jax.checkpoint adds
            rows.append({"problem": name, "name": case.name, "fails": str(error).partition(": %")[0]})
            show(rows[-1])
            continue
        equations = walk.all_equations(jax.make_jaxpr(case.step)(case.carry, *case.args).jaxpr)
        operands = [str(eqn.invars[0].aval.dtype) for eqn in equations if ir.name(eqn) in PRODUCT_NAMES]
        found = {"megabytes": counted.bytes / 1e6, "kernels": counted.kernels}
        rows.append({"problem": name, "name": case.name, **found, **Counter(operands)})
        rows[-1]["bytes_ratio"] = rows[-1]["megabytes"] / rows[0]["megabytes"]
        show(rows[-1])
    return rows


def _in_dtype(fun: Callable[..., Any], x64: bool) -> Callable[..., Any]:
    """A function that is traced with or without x64."""

    def run(*args: Any) -> Any:
        with jax.enable_x64(x64):
            return fun(*args)

    return run


def _step(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A step that reads all of a result, and hardly changes the carry."""

    def step(carry: Any, *args: Any) -> Any:
        total = sum(jnp.sum(x) for x in jax.tree.leaves(fun(carry, *args)))
        return jax.tree.map(lambda x: x + (total * 1e-20).astype(x.dtype), carry)

    return step


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def main(only: list[str], quick: bool) -> Rows:
    rows: Rows = []
    for name in (x for x in PROBLEMS if not only or x in only):
        library = LIBRARIES.get(name)
        if library and importlib.util.find_spec(library) is None:
            print(f"{name}: left out, because {library} is not installed")
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(errors, (name, quick))
        timed = across({"problem": name}, times, name, quick, quick=quick)
        rows += [row | {"error": found.get(row["name"])} for row in timed]
        print(f"{name}, errors:", ", ".join(f"{how} {error:.1e}" for how, error in found.items()), flush=True)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.float64", __doc__)
    arguments.add_argument("--only", nargs="*", default=[], choices=PROBLEMS, help="problems, by name")
    arguments.add_argument("--target", choices=TARGETS, help="compile for it, and count bytes")
    options = arguments.parse_args()
    if options.target:
        jax.config.update("jax_platforms", "cpu")
    device = options.target or jax.devices()[0].device_kind
    about = record("benchmarks.float64", options.quick, device, ("diffrax", "numpyro"))
    if options.target is None:
        write(options.json, about | {"float64": main(options.only, options.quick)})
    elif is_installed(options.target):
        found = [bytes_on(options.target, name, options.quick) for name in options.only or PROBLEMS]
        write(options.json, about | {"rows": [row for rows in found for row in rows]})
