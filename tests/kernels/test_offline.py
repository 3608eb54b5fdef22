"""Every kernel variant compiles for the GPUs that we name, and keeps to its registers."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

SCRIPT = Path(__file__).with_name("offline.py")
ROOT = Path(__file__).resolve().parents[2]


EXPERTS = {"tiny_up", "tiny_down", "rows_up", "rows_down"}
FLOATS = EXPERTS | {
    "route_kernel", "sort_kernel", "count_kernel", "add_up_kernel", "place_kernel",
    "sum_kernel", "one_query_kernel", "one_query_merge", "linears_one", "linears_few",
    "norm_rows_kernel", "rope_kernel", "rope_attention_kernel", "_tile_map", "_grouped",
    "delta_rule_step_kernel", "state_space_step_kernel", "delta_rule_kernel", "state_space_kernel",
    "convolution_step_kernel",
}  # fmt: skip
LATENTS = {"latents_kernel", "latents_merge"}
ADAPTERS = {"rank_rows", "rank_pairs"}
TRAINING = {
    "wgrad_kernel", "activate_backward_kernel", "fill_kernel", "activate_rows_kernel",
    "invert_kernel", "bias_dots_kernel",
}  # fmt: skip
BESIDE = "sort_beside_tokens_kernel"  # with codes
KERNELS = {
    "one_of_each": FLOATS | LATENTS | TRAINING,
    "floats": FLOATS,
    "all_floats": FLOATS,
    "latents": LATENTS,
    "quantized_linears": {
        "quantized_linears_few", "quantized_row", "norm_rows_kernel", "arrange_kernel",
        "decode_kernel",
    },
    "ranks": {
        "pack_kernel", "unpack_kernel", "combine_kernel", "dispatch_kernel",
        "combine_pushed_kernel", "sum_pushed_kernel", "in_batches_kernel", "slots_kernel",
        "copy_kernel", "sum_slots_kernel", "order_kernel", "put_back_kernel", "rows_up",
        "rows_down",
    },
    "training": TRAINING,
    "adapters": EXPERTS | ADAPTERS | {"_grouped"},
    "codes": EXPERTS | {"arrange_kernel", "decode_kernel", BESIDE},
    "by_row": EXPERTS | {
        "quantize_rows_kernel", "largest_kernel", "largest_of_pairs_kernel", "quantize_kernel",
        "quantize_blocks_kernel", "static_factors_kernel", "copy_to_rows_kernel",
        "decode_tokens_kernel", BESIDE,
    },
    "more_codes": EXPERTS | {"arrange_kernel", "decode_kernel", BESIDE},
    "other_codes": EXPERTS | {
        "arrange_kernel", "decode_kernel", "largest_kernel", "emulate_kernel", BESIDE,
    },
}  # fmt: skip
QUANTIZE = {
    "quantize_tokens_kernel", "quantize_rows_kernel", "quantize_kernel", "quantize_blocks_kernel",
    "static_factors_kernel", "quantize_batches_kernel",
}  # fmt: skip
STREAMED = {"one_up", "one_down", "few_up", "few_down"}  # of codes, on Hopper
CAPABILITIES = (90, 80, 89, 100)


def each() -> Iterator[Any]:
    """One variant of each kernel of floats, latents and training, for Hopper, is tested always;
    tiles are tuned for it alone, so all of floats are compiled for it alone."""
    for capability, part in itertools.product(CAPABILITIES, KERNELS):
        if capability != 90 and part in ("one_of_each", "all_floats"):
            continue
        marks = [] if part == "one_of_each" else [pytest.mark.every]
        yield pytest.param(capability, part, marks=marks)


def compiled(capability: int, part: str) -> list[dict[str, Any]]:
    """What `offline.py` says of a part's variants."""
    # In a process of its own, as Triton interprets kernels in this one.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), part],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_invariant_calls_compile_and_spill_nothing(capability: int) -> None:
    variants = compiled(capability, "invariant")
    streamed = STREAMED if capability == 90 else set()
    used = {"one_query_kernel", "one_query_merge", "linears_few", "norm_rows_kernel", "sum_kernel"}
    assert {v["kernel"] for v in variants} >= EXPERTS | used | streamed
    assert [v for v in variants if v["shared"] > v["memory"]] == []
    assert [v for v in variants if v["spilled"] > (0 if capability == 90 else 64)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "part"), each())
def test_every_variant_compiles_and_spills_nothing(capability: int, part: str) -> None:
    variants = compiled(capability, part)
    others = ("one_of_each", "latents", "quantized_linears", "ranks", "training", "adapters")
    quantized = part not in others and not part.endswith("floats")
    streamed = STREAMED if capability == 90 and quantized else set()
    if capability == 90 and part == "quantized_linears":
        streamed = {"quantized_linears_stream", "quantized_row_stream"}
        streamed |= {"quantized_linears_tiles", "sum_parts"}
    if capability == 90 and part == "ranks":
        streamed = {"few_up", "few_down", "quantize_batches_kernel"}
    over_latents = capability == 90 and part in ("one_of_each", "latents")
    hopper = {"latents_hopper_kernel"} if over_latents else set()
    if capability == 90 and (part == "one_of_each" or part.endswith("floats")):
        hopper |= {"rope_attention_short", "linears_few_outputs"}
    assert {v["kernel"] for v in variants} >= KERNELS[part] | streamed | hopper
    assert [v for v in variants if v["shared"] > v["memory"]] == []
    # Tiles are tuned for Hopper and weights by rows; elsewhere a few bytes are no harm.
    tuned = [v for v in variants if capability == 90 and "transposed" not in v["call"]]
    assert [v for v in tuned if v["spilled"] > 0] == []
    assert [v for v in variants if v["spilled"] > 64] == []
    if quantized:  # also where rows of words are no multiple of 64 bytes
        assert min(size for v in variants for size in v["copies"]) >= 8
    assert [v for v in variants if v["nans"] > 0] == []
    # Scales are the definition's to the bit; Triton's `/` is `div.full`, which is off by two.
    quantizes = [v["divides"] for v in variants if v["kernel"] in QUANTIZE]
    emulates = [v["divides"] for v in variants if v["kernel"] == "emulate_kernel"]
    beside = [v["divides"] for v in variants if v["kernel"] == BESIDE]
    assert all(divides == ["rn"] for divides in quantizes)
    assert all(divides in (["rn"], []) for divides in emulates + beside)  # none by powers of two
    assert bool(emulates) == (part == "other_codes")
    of_blocks = part in ("codes", "ranks") and capability >= 89
    assert bool(quantizes) == (part == "by_row" or of_blocks)
