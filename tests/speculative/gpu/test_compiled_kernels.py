"""The Triton kernels as they are compiled for GPUs, without one: down to machine code, in bfloat16.

All for Hopper, and for compute capability 8.9 what makes FP8, which is done in another way there.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]
SHARED_MEMORY = 99 << 10  # of a block, on the GPUs since Ampere that have the least
COMPILE = """
import json
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from speculative.gpu import triton_attention, triton_drafts, triton_edits, triton_filters, triton_layers, triton_prompts
from speculative.gpu import triton_vocabulary

capability = int(sys.argv[1])

def compiled(name, kernel, kinds, warps=4, stages=3, **constants):
    if capability == 89 and "FP8" not in name:
        return
    signature = dict(zip(kernel.arg_names, kinds.split(), strict=False)) | dict.fromkeys(constants, "constexpr")
    multiples = [index for index, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*" or "stride" in arg]
    aligned = {(index,): [["tt.divisibility", 16]] for index in multiples}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    print("KERNEL", name)
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    print(json.dumps({"ttir": made.asm["ttir"], "ptx": made.asm["ptx"], "shared": made.metadata.shared}))

plain, ruled = {"WINDOW": 0, "CAP": 0.0}, {"WINDOW": 4096, "CAP": 72.1}
for dim, group, num_rows, rule in (
    (64, 3, 3, plain), (64, 8, 40, plain), (128, 4, 4, plain), (128, 4, 20, plain), (128, 8, 40, plain),
    (256, 8, 40, plain), (256, 2, 10, ruled),
):
    rows = triton_attention.rows_of_program(num_rows, dim)
    compiled(
        f"attention of {rows} rows, heads of {dim}", triton_attention._attend_splits,
        "*bf16 *bf16 *bf16 *i64 *i64 *i32 *fp32 *fp32 fp32" + 8 * " i32", triton_attention.warps_for(rows, dim),
        triton_attention.STAGES,
        FIRST=0, KV_HEADS=8, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=16, SPLIT=256, SHORT=64, NUM_SHORT=8, NUM_PARTS=32,
        TILE=triton_attention.tile_tokens(dim, 2), ROWS=rows, DIM=dim, ABOVE=16 * (rows > 16), UP_TO=0, SEQS=64,
        **rule,
    )
for dim, group, rule in ((64, 3, plain), (80, 4, plain), (96, 7, ruled), (128, 4, plain), (256, 8, plain)):
    block = triton.next_power_of_2(dim)
    compiled(
        f"attention of prompts, heads of {dim}", triton_prompts._attend_packed,
        "*bf16 *bf16 *bf16 *i32 *i32 *bf16 fp32" + 5 * " i32", triton_prompts.WARPS,
        FIRST=0, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=16, TILE=triton_attention.tile_tokens(block, 2),
        ROWS=triton_prompts.rows_of_program(block, 2), DIM=block, SPANS=16, **rule,
    )
compiled(
    "its merge, heads of 128", triton_attention._merge_parts, "*fp32 *fp32 *i64 *bf16", 1,
    HEAD_DIM=128, NUM_PARTS=32, SPLIT=256, SHORT=64, NUM_SHORT=8, DIM=128, FIRST=0, WINDOW=4096,
)
compiled(
    "filters", triton_filters._find_floor, "*bf16 *fp32 *fp32 *i64 *fp32 *fp32 i32 i32", triton_filters.WARPS,
    TILE=triton_filters._TILE, UNUSED=16,
)
for part in (False, True):
    ids, fixed = ("*i64", {}) if part else ("constexpr", {"ids": None})
    fixed |= {"VOCABULARY": 128256, "NUM_BLOCKS": 63, "PADDED": 64, "BLOCK": 2048}
    for dtype in ("bf16", "fp32"):
        compiled(
            f"q from {dtype}" + ", of a part of the vocabulary" * part, triton_drafts._write_blocks,
            f"*{dtype} *fp32 *i1 *fp32 *fp32 {ids} *i1 *i64 *i64 *fp32 *fp64 *fp64" + 4 * " i32", 8, **fixed,
        )
    compiled(
        "drafts from q" + ", of a part of the vocabulary" * part, triton_drafts._choose_drafts,
        f"*fp32 *fp64 *fp64 {ids} *i1 *fp64 *i64 *i64 *fp64" + 3 * " i32", **fixed,
    )
compiled("mask", triton_edits._copy_allowed, "*bf16 *i32 *i32 *fp32 i32 i32 i32", BLOCK=2048)
compiled("biases", triton_edits._add_biases, "*fp32 *i32 *i32 *fp32 i32 i32 i32", CELLS=256)
compiled(
    "penalties", triton_edits._penalise,
    "*fp32 *i64 *i64 *i64 *i64 *i64 *i32 *i32 *i32 *i1 *fp64 *fp64 *fp64 i32", CELLS=256,
)
for size in (576, 4096, 8192, 16384):
    block = triton.next_power_of_2(size)
    compiled(
        f"sum and norm of {size}", triton_layers._add_norm, 5 * "*bf16 " + "*fp32 fp32",
        triton_layers.norm_warps(block), SIZE=size, BLOCK=block, QUANTIZED=False,
    )
    compiled(
        f"sum, norm and FP8 of {size}", triton_layers._add_norm, 4 * "*bf16 " + "*fp8e4nv *fp32 fp32",
        triton_layers.norm_warps(block), SIZE=size, BLOCK=block, QUANTIZED=True,
    )
compiled("gate of 14336", triton_layers._gate, "*bf16 *bf16", SIZE=14336, BLOCK=1024)
for gated, size in ((True, 1536), (True, 14336), (False, 576), (False, 8192)):
    block = triton_layers.quantized_at_once(size)
    compiled(
        f"gate and FP8 of {size}" if gated else f"FP8 of {size}", triton_layers._quantize, "*bf16 *fp8e4nv *fp32",
        triton_layers.norm_warps(2 * block), SIZE=size, BLOCK=block, GATED=gated,
    )
for heads, half, normed in ((9, 32, False), (32, 40, False), (32, 64, True), (16, 128, True)):
    dim = triton.next_power_of_2(half)
    compiled(
        f"rotation of {heads} heads of {2 * half}" + ", normed" * normed, triton_layers._rotate_and_store,
        "*bf16 *fp32 *i64 *i64 *bf16 *bf16 *bf16 *bf16 fp32",
        HEADS=heads, KV_HEADS=heads // 4, HALF=half, NORMED=normed, TILE=512 // dim, DIM=dim,
    )
pointers = dict.fromkeys(("packed", "places", "drafts", "first_rows", "counts", "entries", "offsets"), "*i64")
pointers |= dict.fromkeys(("temperature", "maxima", "facts", "floors", "q", "log_min_ps", "top_ps"), "*fp32")
pointers |= dict.fromkeys(("greedy", "counted", "coupled", "checked", "reported"), "*i1")
pointers |= {"logits": "*bf16", "columns": "*i32"} | dict.fromkeys(("top_ks", "seeds", "positions"), "*i64")
numbers = dict.fromkeys(("stride", "q_stride", "num_rows", "num_entries"), "i32") | {"mass_rounding": "fp32"}
sizes = {"VOCABULARY": 128256, "NUM_BLOCKS": 63, "PADDED": 64, "BLOCK": 2048, "LANES": 128, "PROCESSED": True}
sizes |= {"NUM_STAKES": 12, "PADDED_STAKES": 16}
for kernel in vars(triton_vocabulary).values():
    if "num_rows" in getattr(kernel, "do_not_specialize", ()):
        for q in (0, 1, 2) if "Q" in kernel.arg_names else (2,):
            fixed = {name: value for name, value in (sizes | {"Q": q}).items() if name in kernel.arg_names}
            kinds = [(pointers | numbers).get(name, "*fp64") for name in kernel.arg_names]
            compiled(f"verification: {kernel.fn.__name__}, q {q}", kernel, " ".join(kinds), **fixed)
"""


class Compiled(NamedTuple):
    """A kernel. shared: bytes of a block. registers: of a thread. spilled: bytes that did not fit into them."""

    ttir: str
    ptx: str
    shared: int
    registers: int
    spilled: int


@pytest.fixture(scope="module", params=[89, 90])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """In a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_DUMP_PTXAS_LOG": "1"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(request.param)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    found = {}
    for report in run.stdout.split("KERNEL ")[1:]:
        name, *lines = report.splitlines()
        registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
        assert registers and spilled, report[:2000]
        found[name] = Compiled(**json.loads(lines[-1]), registers=int(registers[1]), spilled=int(spilled[1]))
    return found


def test_sums_stay_in_registers_and_tiles_fit(kernels: dict[str, Compiled]) -> None:
    spilled = {name: kernel.spilled for name, kernel in kernels.items() if kernel.spilled}
    assert all(name.startswith("attention") and size <= 40 for name, size in spilled.items()), spilled
    assert max(kernel.shared for kernel in kernels.values()) <= SHARED_MEMORY


def test_products_run_on_tensor_cores(kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        assert ("mma" in kernel.ptx) == name.startswith("attention"), name


def test_offsets_that_grow_with_the_rows_have_64_bits(kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        narrow = narrow_pointers(kernel.ttir)
        if name.startswith("verification"):  # all but the matrices have a number a row or a token
            assert "logits" not in narrow, name
        else:
            assert narrow <= {"blocks", "spans", "starts", "norm_weight", "ids"}, name


def narrow_pointers(ttir: str) -> set[str]:
    """The arguments that are only ever moved by offsets of 32 bits."""
    root_of: dict[str, str] = {}
    widths: dict[str, set[str]] = {}
    for made, operation, source, types in re.findall(r"(%\w+) = tt\.(\w+) (%\w+)(.*)", ttir):
        root_of[made] = root = root_of.get(source, source)
        if operation == "addptr":
            widths.setdefault(root, set()).add(re.findall(r"i(?:32|64)", types)[-1])
    return {root.removeprefix("%") for root, own in widths.items() if own == {"i32"}}


def test_fp8_is_rounded_to_the_nearest_and_stays_below_its_largest(kernels: dict[str, Compiled]) -> None:
    for name, kernel in kernels.items():
        assert ("cvt.rn.satfinite.e4m3x2." in kernel.ptx) == ("FP8" in name), name


def test_a_rotation_rounds_where_torch_does(kernels: dict[str, Compiled]) -> None:
    """A thread has four pairs of numbers: their products with cosines, the sums, and a norm's results and products with
    weights are rounded, and at least one cosine and sine. A compiler that dropped one would change results."""
    for name, kernel in kernels.items():
        if name.startswith("rotation"):
            single, double = (len(re.findall(rf"(?:\.rn|mul)\.bf16{one}[.\s]", kernel.ptx)) for one in ("", "x2"))
            assert single + 2 * double >= 2 + 8 * (4 if "normed" in name else 2), name
