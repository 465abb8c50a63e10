"""`benchmarks.hlo`: the bytes and kernels of programs whose counts are known by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo

PROGRAM = """
%branch.1 (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %c = f32[64]{0} copy(%p)
}

%branch.2 (q: f32[64]) -> f32[64] {
  ROOT %q = f32[64]{0} parameter(0)
}

%g (p0: f32[64], p1: bf16[64], p2: f32[64]) -> (f32[64], f32[64]) {
  %p0 = f32[64]{0} parameter(0)
  %p1 = bf16[64]{0} parameter(1)
  %p2 = f32[64]{0} parameter(2)
  %wide = f32[64]{0} convert(%p1)
  %s0 = f32[64]{0} add(%p0, %wide)
  %s1 = f32[64]{0:T(128)S(1)} add(%wide, %p2)
  ROOT %both = (f32[64]{0}, f32[64]{0:T(128)S(1)}) tuple(%s0, %s1)
}

ENTRY %main (a: f32[64], b: bf16[64]) -> (f32[64], f32[64]) {
  %a = f32[64]{0} parameter(0)
  %b = bf16[64]{0} parameter(1)
  %flag = pred[] constant(true)
  %n = s32[] constant(3)
  %sum = s32[] add(%n, %n)
  %buffer = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"
  %f = (f32[64]{0}, /*index=1*/f32[64]{0:T(128)S(1)}) fusion(%a, %b, %a), kind=kLoop, calls=%g
  %x = f32[64]{0} get-tuple-element(%f), index=0
  %on_chip = f32[64]{0:T(128)S(1)} get-tuple-element(%f), index=1
  %start = (f32[64]{0:T(128)}, f32[64]{0:T(128)S(1)}, u32[]{:S(2)}) copy-start(%on_chip)
  %done = f32[64]{0:T(128)} copy-done(%start)
  %chosen = f32[64]{0} conditional(%flag, %x, %x), branch_computations={%branch.1, %branch.2}
  ROOT %tuple = (f32[64]{0}, f32[64]{0}) tuple(%chosen, %done)
}
"""


def test_bytes_are_counted_once_an_operand_and_only_in_main_memory():
    # The fusion reads 256 + 128 and writes 256, the copy from the chip writes 256, the larger branch copies 256.
    assert hlo.count(PROGRAM) == hlo.Counts(256 + 128 + 256 + 256 + 2 * 256, 2)
    assert hlo.Device(bandwidth=1e6, launch=1e-3).milliseconds(hlo.Counts(500, 3)) == 0.5 + 3


# The stack has 10 rows of 64 numbers, 256 bytes each.
LOOP = """
%sliced (p0: f32[10,64], p1: s32[]) -> bf16[64] {{
  %p0 = f32[10,64]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %low = bf16[10,64]{{1,0}} convert(%p0)
  %row = bf16[1,64]{{1,0}} dynamic-slice(%low, %p1, %zero), dynamic_slice_sizes={{1,64}}
  ROOT %vector = bf16[64]{{0}} bitcast(%row)
}}

%nested (q0: bf16[64], q1: f32[10,64], q2: f32[10,64], q3: s32[]) -> (f32[10,64], f32[10,64]) {{
  %q1 = f32[10,64]{{1,0}} parameter(1)
  %q0 = bf16[64]{{0}} parameter(0)
  %q2 = f32[10,64]{{1,0}} parameter(2)
  %q3 = s32[] parameter(3)
  %zero.1 = s32[] constant(0)
  %inner = bf16[64]{{0}} fusion(%q2, %q3), kind=kLoop, calls=%sliced
  %product = bf16[64]{{0}} multiply(%q0, %inner)
  %update = f32[1,64]{{1,0}} convert(%product)
  %flat = f32[10,64]{{1,0}} bitcast(%q1)
  %written = f32[10,64]{{1,0}} dynamic-update-slice(%flat, %update, %q3, %zero.1)
  %fresh = f32[10,64]{{1,0}} broadcast(%zero.1), dimensions={{}}
  %whole = f32[10,64]{{1,0}} dynamic-update-slice(%fresh, %update, %q3, %zero.1)
  ROOT %both = (f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) tuple(%written, %whole)
}}

%body (state: (s32[], f32[10,64], f32[10,64])) -> (s32[], f32[10,64], f32[10,64]) {{
  %state = (s32[], f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %ins = f32[10,64]{{1,0}} get-tuple-element(%state), index=1
  %outs = f32[10,64]{{1,0}} get-tuple-element(%state), index=2
  %row.1 = bf16[64]{{0}} fusion(%ins, %i), kind=kLoop, calls=%sliced
  %step = (f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) fusion(%row.1, %outs, %ins, %i), kind=kLoop, calls=%nested
  %new = f32[10,64]{{1,0}} get-tuple-element(%step), index=0
  ROOT %next = (s32[], f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) tuple(%i, %ins, %new)
}}

%condition (state.1: (s32[], f32[10,64], f32[10,64])) -> pred[] {{
  %state.1 = (s32[], f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) parameter(0)
  %limit = s32[]{{:T(128)}} constant(10)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}}

ENTRY %main (start: (s32[], f32[10,64], f32[10,64])) -> (s32[], f32[10,64], f32[10,64]) {{
  %start = (s32[], f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) parameter(0)
  ROOT %loop = (s32[], f32[10,64]{{1,0}}, f32[10,64]{{1,0}}) while(%start), condition=%condition, body=%body{noted}
}}
"""


@pytest.mark.parametrize(
    ("noted", "times"),
    [("", 10), (', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}', 7)],
)
def test_a_loop_reads_and_writes_of_its_stacks_what_each_iteration_touches(noted, times):
    first = 256 + 4 + 128  # a row of float32 and the index in, a row of bfloat16 out
    second = 128 + 4 + 256 + 256 + 10 * 256  # both rows and the index in, a row in place and a whole new array out
    assert hlo.count(LOOP.format(noted=noted)) == hlo.Counts(times * (first + second), 2 * times)


SCATTER = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}

%used_twice (p0: f32[10,64], p1: f32[1,64], p2: s32[]) -> f32[10,64] {
  %p0 = f32[10,64]{1,0} parameter(0)
  %p1 = f32[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %updated = f32[10,64]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
  ROOT %negative = f32[10,64]{1,0} negate(%updated)
}

ENTRY %main (x: f32[10,64], rows: f32[2,64], at: s32[2,1]) -> f32[10,64] {
  %x = f32[10,64]{1,0} parameter(0)
  %rows = f32[2,64]{1,0} parameter(1)
  %at = s32[2,1]{1,0} parameter(2)
  %row = f32[1,64]{1,0} slice(%rows), slice={[0:1], [0:64]}
  %i = s32[] constant(0)
  %added = f32[10,64]{1,0} scatter(%x, %at, %rows), update_window_dims={1}, to_apply=%sum
  %called = (f32[10,64]{1,0}, s8[33554432]{0}) custom-call(%added, %rows), custom_call_target="__cublas$lt$matmul"
  %result = f32[10,64]{1,0} get-tuple-element(%called), index=0
  ROOT %last = f32[10,64]{1,0} fusion(%result, %row, %i), kind=kLoop, calls=%used_twice
}
"""


def test_a_scatter_touches_its_updates_and_what_is_not_in_place_is_whole():
    scatter = 8 + 3 * 512  # indices and updates in, the sums in and out
    library = 2560 + 512 + 2560  # without its workspace of 32 MB
    assert hlo.count(SCATTER) == hlo.Counts(2 * 256 + scatter + library + 2560 + 256 + 4 + 2560, 4)


def counted(fun, *shapes, donate=()):
    return hlo.count(jax.jit(fun, donate_argnums=donate).lower(*shapes).compile().as_text()).bytes


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ROWS, INDEX = floats(4096, 128), jax.ShapeDtypeStruct((), jnp.int32)
INDICES = jax.ShapeDtypeStruct((8,), jnp.int32)


def put(x, row, i):
    return jax.lax.dynamic_update_index_in_dim(x, row, i, 0)


def test_a_gather_reads_the_rows_it_gathers():
    assert counted(lambda x, i: x[i], ROWS, INDICES) == 32 + 2 * 8 * 512


def test_an_update_in_place_moves_the_update_and_one_that_is_not_copies_the_array():
    assert counted(put, ROWS, floats(1, 128), INDEX, donate=0) == 2 * 512 + 4
    assert counted(put, ROWS, floats(1, 128), INDEX) == 2 * 512 + 4 + 2 * 4096 * 512


SIZE = 64 * 256 * 4


def test_a_while_loop_counts_as_often_as_it_runs():
    found = counted(lambda x: jax.lax.fori_loop(0, 10, lambda i, x: x * 2 + 1, x), floats(64, 256))
    assert found == pytest.approx((2 * 10 + 2) * SIZE, rel=1e-3)  # and a copy, because the argument is not donated


@pytest.mark.parametrize("layers", [4, 40])
def test_a_scan_reads_each_layer_once_and_writes_each_output_once(layers):
    ws, x = floats(layers, 64, 256), floats(64, 256)
    mapped = counted(lambda ws: jax.lax.map(lambda w: w * 2, ws), ws)
    assert mapped == pytest.approx(3 * layers * SIZE, rel=1e-3)  # in, out, and zeros where the output will be
    carried = counted(lambda ws, x: jax.lax.scan(lambda h, w: (jnp.tanh(h + w), None), x, ws)[0], ws, x)
    assert carried == pytest.approx((3 * layers + 2) * SIZE, rel=1e-3)  # a layer, the carry in and out; a copy


def layer(h, w):
    return jnp.tanh(h @ w), None


def scanned(ws, x):
    return jax.lax.scan(layer, x, ws)[0].sum()


def unrolled(ws, x):
    for i in range(ws.shape[0]):
        x, _ = layer(x, ws[i])
    return x.sum()


def test_the_bytes_of_a_layer_do_not_grow_with_the_number_of_layers():
    of = lambda fun, n: counted(jax.grad(fun), floats(n, 128, 128), floats(1024, 128)) / n
    assert of(scanned, 24) == pytest.approx(of(scanned, 6), rel=0.1)
    assert 1.0 < of(scanned, 6) / of(unrolled, 6) < 3.5  # the loop stacks what the backward pass needs
