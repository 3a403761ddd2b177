"""The kernels of a compiled module, read from XLA's texts."""

from __future__ import annotations

from xrl_jax.measure.gpu.hlo import Module, Shape, read_module
from xrl_jax.measure.gpu.kernels import Kernel, Product, read_kernels

# What XLA prints, shortened: y = relu(conv(x, w) + b), then the mean of sin(y @ m).
HLO = """\
HloModule jit_f, is_scheduled=true

%gemm_computation (p.0: f32[128,64], p.1: f32[64,32]) -> f32[128,32] {
  %p.0 = f32[128,64]{1,0} parameter(0)
  %p.1 = f32[64,32]{1,0} parameter(1)
  ROOT %dot.0 = f32[128,32]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum_computation (p.2: f32[128,32]) -> f32[128] {
  %p.2 = f32[128,32]{1,0} parameter(0)
  %zero.0 = f32[] constant(0)
  ROOT %reduce.0 = f32[128]{0} reduce(%p.2, %zero.0), dimensions={1}, to_apply=%add
}

ENTRY %main (x.1: f32[1,8,16,32], w.1: f32[64,3,3,32], b.1: f32[64], m.1: f32[64,32]) -> f32[128] {
  %x.1 = f32[1,8,16,32]{3,2,1,0} parameter(0)
  %w.1 = f32[64,3,3,32]{3,2,1,0} parameter(1)
  %b.1 = f32[64]{0} parameter(2)
  %m.1 = f32[64,32]{1,0} parameter(3)
  %conv.1 = (f32[1,8,16,64]{3,2,1,0}, u8[4096]{0}) custom-call(%x.1, %w.1, %b.1), \
window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBiasActivationForward", backend_config={"reification_cost":[]}
  %y.1 = f32[1,8,16,64]{3,2,1,0} get-tuple-element(%conv.1), index=0
  %bitcast.1 = f32[128,64]{1,0} bitcast(%y.1)
  %gemm.1 = f32[128,32]{1,0} fusion(%bitcast.1, %m.1), kind=kCustom, calls=%gemm_computation
  ROOT %sum.1 = f32[128]{0} fusion(%gemm.1), kind=kInput, calls=%sum_computation, \
backend_config={"reification_cost":[{"exec_time_us":2.5,"name":""},\
{"exec_time_us":1.5,"name":"indexing-cost-model"}]}
}
"""
THUNKS = """\
001: kConvolution [source       | next=000 (1)] kConvolution
000: kCommandBuffer [prev=001 (1) | sink]
    002: kCustomKernel [source       | next=003 (1)] gemm_1 grid: [8, 1, 1] threads: [128, 1, 1]
    003: kCustomKernel [prev=002 (1) | sink        ] sum_1 grid: [1, 1, 1] threads: [128, 1, 1]
"""


def metadata(*thunks: tuple[int, str, str]) -> str:
    return "\n".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n'
        f'    thunk_id: {number}\n  }}\n  thunk_kind: "{kind}"\n}}'
        for number, name, kind in thunks
    )


def test_shapes_and_operands_are_read() -> None:
    module = read_module(HLO)
    conv = module.by_name["conv.1"]
    assert conv.opcode == "custom-call"
    assert conv.operands == ("x.1", "w.1", "b.1")
    assert conv.shapes == (Shape("f32", (1, 8, 16, 64)), Shape("u8", (4096,)))
    assert conv.attribute("dim_labels") == "b01f_o01i->b01f"
    assert [i.opcode for i in module.called(module.by_name["sum.1"])] == [
        "parameter",
        "constant",
        "reduce",
    ]


def test_bytes_of_types() -> None:
    sizes = {t: Shape(t, (10,)).bytes for t in ("pred", "s8", "bf16", "f32", "f64", "c64")}
    assert sizes == {"pred": 10, "s8": 10, "bf16": 20, "f32": 40, "f64": 80, "c64": 80}
    assert Shape("f8e4m3fn", (10,)).bytes == 10


def test_kernels_of_a_module() -> None:
    of = metadata(
        (1, "conv.1", "kConvolution"), (2, "gemm.1", "kCustomKernel"), (3, "sum.1", "kCustomKernel")
    )
    conv, gemm, total = read_kernels(read_module(HLO), THUNKS, of)
    assert conv.kind == "conv" and conv.graph == 0
    assert conv.products == (Product(1, m=128, n=64, k=288, dtype="tf32"),)
    assert conv.bytes == 4 * (4096 + 64 * 288 + 64 + 8192)
    assert gemm.kind == "product" and gemm.graph == 1
    assert gemm.products == (Product(1, m=128, n=32, k=64, dtype="tf32"),)
    assert total == Kernel("sum.1", "reduce", 4 * (4096 + 128), graph=1, xla_seconds=1.5e-6)


def test_a_loop_repeats_its_kernels() -> None:
    text = 'ENTRY %m (t.1: f32[]) -> f32[] {\n  %w.1 = f32[] while(%t.1), condition=%c, body=%b, \
backend_config={"known_trip_count":{"n":"10"}}\n}\n'
    thunks = """\
000: kCommandBuffer [source | sink]
    001: kCopy   [source | next=002 (1)] kCopy
    002: kWhile  [prev=001 (1) | sink]
condition:
        003: kCustomKernel [source | sink] less
      body:
        004: kCustomKernel [source | sink] add
    005: kCustomKernel [source | sink] last
006: kCustomCall [source | sink] kCustomCall
"""
    found = read_kernels(read_module(text), thunks, metadata((2, "w.1", "kWhile")))
    assert [(k.times, k.graph) for k in found] == [(1, 1), (10, 1), (10, 1), (1, 1), (1, 0)]


def test_the_type_that_is_multiplied() -> None:
    def product(dtype: str, more: str) -> Product | None:
        text = f"""\
%c (p.0: {dtype}[4,8], p.1: {dtype}[8,2]) -> {dtype}[4,2] {{
  %p.0 = {dtype}[4,8]{{1,0}} parameter(0)
  %p.1 = {dtype}[8,2]{{1,0}} parameter(1)
  ROOT %dot.0 = {dtype}[4,2]{{1,0}} dot(%p.0, %p.1), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}{more}
}}

ENTRY %m (a.0: {dtype}[4,8], b.0: {dtype}[8,2]) -> {dtype}[4,2] {{
  %a.0 = {dtype}[4,8]{{1,0}} parameter(0)
  %b.0 = {dtype}[8,2]{{1,0}} parameter(1)
  ROOT %f.0 = {dtype}[4,2]{{1,0}} fusion(%a.0, %b.0), kind=kCustom, calls=%c
}}
"""
        of = metadata((1, "f.0", "kCustomKernel"))
        return read_kernels(read_module(text), "001: kCustomKernel [] f_0", of)[0].products[0]

    assert product("f32", "") == Product(1, 4, 2, 8, "tf32")
    assert product("f32", ", operand_precision={highest,highest}") == Product(1, 4, 2, 8, "float32")
    assert product("f32", ", algorithm=dot_bf16_bf16_f32_x3") == Product(1, 4, 2, 8, "bfloat16", 3)
    assert product("f32", ", algorithm=dot_tf32_tf32_f32_x3") == Product(1, 4, 2, 8, "tf32", 3)
    assert product("f16", "") == Product(1, 4, 2, 8, "float16")


def test_attention_is_known_by_the_name_of_its_kernel() -> None:
    text = """\
ENTRY %m (q.1: f32[512], b.1: f32[8]) -> f32[512] {
  %q.1 = f32[512]{0} parameter(0)
  %b.1 = f32[8]{0} parameter(1)
  ROOT %call.1 = f32[512]{0} custom-call(%q.1, %q.1, %b.1), \
custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/attention_2x4x8x16x32_1_tf32/pallas_call"}
}
"""
    of = metadata((1, "call.1", "kCustomKernel"))
    (found,) = read_kernels(read_module(text), "001: kCustomKernel [] call", of)
    assert (found.kind, found.bytes) == ("attention", 4 * (512 + 8 + 512))
    assert found.products == (Product(2, 4, 8, 16, "tf32"), Product(2, 4, 32, 8, "tf32"))


def test_a_product_is_known_by_the_name_of_its_kernel() -> None:
    text = """\
ENTRY %m (x.1: f32[800], w.1: f32[1600]) -> f32[2048] {
  %x.1 = f32[800]{0} parameter(0)
  %w.1 = f32[1600]{0} parameter(1)
  ROOT %call.1 = f32[2048]{0} custom-call(%x.1, %w.1), \
custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/product_32x64x25_32x32_tf32/pallas_call"}
}
"""
    of = metadata((1, "call.1", "kCustomKernel"))
    (found,) = read_kernels(read_module(text), "001: kCustomKernel [] call", of)
    assert found.kind == "product"
    assert found.products == (Product(1, 32, 64, 25, "tf32", tile=(32, 32)),)


def test_a_library_of_another_kind_is_a_call() -> None:
    text = "ENTRY %m (x.1: f32[8]) -> c64[5] {\n  %x.1 = f32[8]{0} parameter(0)\n"
    text += "  ROOT %fft.1 = c64[5]{0} fft(%x.1), fft_type=RFFT, fft_length={8}\n}\n"
    (found,) = read_kernels(read_module(text), "001: kFft [] kFft", metadata((1, "fft.1", "kFft")))
    assert found == Kernel("fft.1", "call", 4 * 8 + 8 * 5)


def test_a_thunk_of_an_unknown_instruction_is_a_call() -> None:
    (found,) = read_kernels(Module({}), "001: kCustomCall [] kCustomCall", "")
    assert found == Kernel("CustomCall", "call", 0)
