"""Dataflow analyses, beside what each program says by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp._jaxprs import constructs, ir
from jamp._jaxprs.dataflow import Backward, Forward, flags, sources, spreads

X = jnp.ones((4, 4))
# The property starts at a tangent and a sine: after one going forward, before the other going backward.
forward = spreads(lambda eqn, operands: any(operands) or ir.name(eqn) == "tan")
backward = Backward(lambda eqn, results: any(results) or ir.name(eqn) == "sin")


def rotate(start, times):
    """A carry of which each element takes a step to the next place."""
    return lambda *xs: lax.scan(lambda c, _: ((start(xs[-1]), *c[:-1]), c[-1]), tuple(xs[:3]), None, length=times)


def by_while(cond, body):
    return lambda *xs: lax.while_loop(cond, body, xs)


@jax.custom_jvp
def own(x, y):
    return jnp.tan(x), y


own.defjvp(lambda p, t: (own(*p), t))

# A function of three arrays, and which of its results depend on a tangent.
RESULTS = {
    "straight": (lambda x, y, z: (jnp.tan(x) + y, x + y, y * 1), [True, False, False]),
    "jit": (lambda x, y, z: jax.jit(lambda x, y: (jnp.tan(x), y + z))(x, y), [True, False]),
    "call": (lambda x, y, z: own(x, y), [True, False]),
    "checkpoint": (lambda x, y, z: jax.checkpoint(lambda x, y: (x + y, jnp.tan(y)))(x, y), [False, True]),
    "cond": (lambda x, y, z: lax.cond(x[0, 0] > 0, lambda x: (x, x), lambda x: (x, jnp.tan(x)), y), [False, True]),
    "carry": (rotate(jnp.tan, 9), [True] * 4),
    "carry, none": (rotate(jnp.cos, 9), [False] * 4),
    "scan of scans": (
        lambda x, y, z: lax.scan(lambda c, _: rotate(jnp.tan, 2)(*c), (x, y, z), None, length=2),
        [True] * 4,
    ),
    "while": (by_while(lambda c: jnp.tan(c[0])[0, 0] < 9, lambda c: (c[1] * 2, c[2], jnp.tan(c[2]))), [True] * 3),
    "condition alone": (by_while(lambda c: jnp.tan(c[0])[0, 0] < 9, lambda c: (c[1] * 2, c[2], c[0])), [False] * 3),
}
# A function of three arrays, and which of them are read by a sine.
READS = {
    "straight": (lambda x, y, z: (jnp.sin(x * 2) + y, z), [True, False, False]),
    "jit": (lambda x, y, z: jax.jit(lambda x, y: (x * y, jnp.sin(z)))(x, y), [False, False, True]),
    "checkpoint": (lambda x, y, z: jax.checkpoint(lambda x, y: (x + y, jnp.sin(y)))(x, z), [False, False, True]),
    "later": (lambda x, y, z: jnp.sin(jax.jit(lambda x, y: (x, y))(x, y)[1]) + z, [False, True, False]),
    "cond": (
        lambda x, y, z: lax.cond(z[0, 0] > 0, lambda x, y: x, lambda x, y: jnp.sin(x), x, y),
        [True, False, False],
    ),
    "carry": (
        lambda x, y, z: lax.scan(lambda c, _: ((c[0], c[0], c[1]), jnp.sin(c[2])), (x, y, z), None, 5),
        [True] * 3,
    ),
    "carry, later": (lambda x, y, z: jnp.sin(lax.scan(lambda c, _: ((z, c[0]), 0), (x, y), None, 5)[0][1]), [True] * 3),
    "carry, none": (lambda x, y, z: lax.scan(lambda c, _: ((c[0], c[0]), c[1]), (x, y), None, 5), [False] * 3),
    "condition": (by_while(lambda c: jnp.sin(c[0])[0, 0] < 9, lambda c: (c[1] * 2, c[1], c[2])), [True, True, False]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_forward_follows_values_into_constructs_and_around_loops(name):
    fun, want = RESULTS[name]
    closed = jax.make_jaxpr(fun)(X, X, X)
    for given, expected in ((False, want), (True, [True] * len(want))):
        facts = forward(closed, [given] * len(closed.in_avals))
        assert forward.read(facts, closed.jaxpr.outvars) == expected


@pytest.mark.parametrize("name", READS)
def test_backward_follows_readers_into_constructs_and_around_loops(name):
    fun, want = READS[name]
    closed = jax.make_jaxpr(fun)(X, X, X)
    assert flags(closed.jaxpr.invars, backward(closed, [False] * len(closed.out_avals))) == want


def test_the_inputs_and_outputs_of_bodies_are_those_of_every_step():
    (eqn,) = jax.make_jaxpr(rotate(jnp.tan, 9))(X, X, X).eqns
    n = constructs.carry(eqn).start
    assert forward.into(eqn, dict.fromkeys(eqn.invars, False)) == [[False] * n + [True] * 3]
    (eqn,) = jax.make_jaxpr(READS["carry"][0])(X, X, X).eqns
    assert backward.into(eqn, set()) == [[True, True, False]]  # Of the carry, JAX made one element a constant.
    (eqn,) = jax.make_jaxpr(READS["condition"][0])(X, X, X).eqns
    assert backward.into(eqn, set()) == [[False], [True] + [False] * (len(eqn.outvars) - 1)]


def test_the_rule_decides_about_a_construct_that_is_whole():
    straight_through = jax.custom_jvp(lambda x, rounded: rounded)
    straight_through.defjvp(lambda p, t: (p[1], t[0]))
    closed = jax.make_jaxpr(lambda x, y: jax.jit(straight_through)(x, y))(X, X)
    any_of = lambda eqn, given: any(given)
    for is_whole, want in ((lambda eqn: False, False), (constructs.has_own_rule, True)):
        facts = Forward(any_of, any_of, lambda value: False, is_whole)(closed, [True, False])
        assert [facts[v] for v in closed.jaxpr.outvars] == [want]
        assert flags(closed.jaxpr.invars, Backward(any_of, is_whole)(closed, [True])) == [want, True]


def test_a_backward_rule_may_tell_operands_apart():
    first = Backward(lambda eqn, results: [any(results), *[False] * (len(eqn.invars) - 1)])
    closed = jax.make_jaxpr(lambda x, y, z: jax.jit(lambda x, y: x - y)(z * y, x))(X, X, X)
    assert flags(closed.jaxpr.invars, first(closed, [True])) == [False, False, True]


def test_the_sources_of_a_value_are_the_inputs_that_decide_it():
    def fun(x, y, z, n):
        branch = lax.cond(n > 0, jnp.sin, jnp.cos, x)
        loop = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, y))[1]
        called = jax.pure_callback(lambda z: z, z, z)
        printed = jax.experimental.io_callback(lambda z: z, z, z)
        return branch, loop, jnp.ones(3) + 1, called, printed

    closed = jax.make_jaxpr(fun)(X, X, X, 1)
    found, (x, y, z, n), outputs = sources(closed), closed.jaxpr.invars, closed.jaxpr.outvars
    assert [found[v] for v in outputs] == [{x, n}, {y, n}, set(), {z}, {z, outputs[-1]}]


def test_a_body_is_analysed_once_for_equal_flags():
    calls = []
    count = spreads(lambda eqn, operands: calls.append(eqn) or any(operands))
    inner = jax.jit(lambda x: jnp.tanh(x) + 1)
    fun = lambda x: [x := inner(x) for _ in range(9)]
    count(jax.make_jaxpr(fun)(X), [True])
    assert len(calls) == 2


def test_any_fact_that_can_be_joined_is_followed():
    """The largest element of a value of integers: a constant, the maximum, and unknown (None) of anything else."""
    largest = lambda x, y: None if x is None or y is None else max(x, y)
    rule = lambda eqn, operands: functools.reduce(largest, operands) if ir.name(eqn) == "max" else None
    analysis = Forward(rule, largest, lambda value: int(np.max(value)))

    def fun(x, y):
        loop = lax.fori_loop(0, 3, lambda i, c: jnp.maximum(c, 7), y)
        branch = lax.cond(x > 0, lambda: jnp.maximum(y, 5), lambda: 9)
        return jnp.maximum(x, 4), loop, branch, jnp.maximum(x, y) + 1

    closed = jax.make_jaxpr(fun)(1, 2)
    assert analysis.read(analysis(closed, [3, 2]), closed.jaxpr.outvars) == [4, 7, 9, None]
    assert analysis.read(analysis(closed, [None, 8]), closed.jaxpr.outvars) == [None, 8, 9, None]


def test_a_rule_may_have_a_fact_for_each_result():
    """A sort moves one operand to each result."""
    each = Forward(lambda eqn, operands: operands if ir.name(eqn) == "sort" else max(operands), max, lambda value: 0)
    closed = jax.make_jaxpr(lambda x, y: lax.sort((x, jnp.cos(y), x + y), num_keys=1))(X, X)
    assert each.read(each(closed, [1, 2]), closed.jaxpr.outvars) == [1, 2, 2]
