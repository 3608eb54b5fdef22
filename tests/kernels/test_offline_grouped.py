"""The grouped products for Hopper compile where there is no GPU, and keep to their registers."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("triton", reason="Triton is not installed")

from moe_ops.kernels.triton import LINEAR, Act
from moe_ops.testing import ACTIVATIONS

USED = ("silu", "gpt_oss")  # by the layers of the shipped tables
OTHERS = tuple(name for name in ACTIVATIONS if name not in USED)


def compiled(kernel, names):
    # In a process of its own, as Triton interprets kernels in this one.
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("offline_grouped.py")), kernel, *names],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def each_activation(used: int, others: int) -> pytest.MarkDecorator:
    """Names of activations, with the number of variants that they make."""
    rest = pytest.param(OTHERS, others, marks=pytest.mark.every)
    return pytest.mark.parametrize(
        ("names", "variants"), [(USED, used), rest], ids=["used", "others"]
    )


FEW_SPILLS = Version(version("triton")) < Version("3.7")


@pytest.mark.every
@pytest.mark.slow
@each_activation(9, 16)
def test_the_hopper_kernel_compiles_and_keeps_to_its_registers(names, variants):
    found = compiled("_grouped", names)
    assert len(found) == variants
    spilling = [v for v in found if v["spilled"] > 0]
    # None that a layer of the shipped tables takes: gated SiLU, and the second product.
    taken = [v["ACT"] for v in spilling if v["ACT"]["gated"] or v["ACT"]["kind"] is None]
    assert [act for act in taken if act["kind"] in ("silu", None)] == []
    # Of the others Triton 3.6 spills at most 16 bytes in two, 3.9 at most 88 in seven, all of it
    # outside the loop over K.
    assert max(v["spilled"] for v in found) <= (16 if FEW_SPILLS else 88)
    assert len(spilling) <= (2 if FEW_SPILLS else 7)


@pytest.mark.every
@pytest.mark.slow
@each_activation(10, 16)
def test_the_hopper_kernel_with_adapters_keeps_to_its_registers(names, variants):
    found = compiled("adapted", names)
    assert len(found) == variants
    assert max(v["shared"] for v in found) <= 232448
    # ptxas waits for no single product.
    assert [v for v in found if 3 * v["waits"] > v["products"]] == []
    # Triton 3.9 spills a few bytes outside the loop over K, as without adapters.
    assert max(v["spilled"] for v in found) <= (16 if FEW_SPILLS else 88)


@pytest.mark.every
@pytest.mark.slow
def test_the_hopper_kernel_of_products_that_are_kept_keeps_to_its_registers():
    found = compiled("kept", ["silu"])
    assert len(found) == 2
    # Triton 3.9 spills a few bytes outside the loop over K.
    assert max(v["spilled"] for v in found) <= (0 if FEW_SPILLS else 16)


@pytest.mark.every
@pytest.mark.slow
def test_the_hopper_kernel_of_weights_whose_columns_lie_keeps_to_its_registers():
    found = compiled("by_columns", list(USED))
    assert len(found) == 5
    assert max(v["spilled"] for v in found) <= (8 if FEW_SPILLS else 40)
    assert [v for v in found if 3 * v["waits"] > v["products"]] == []


@pytest.mark.every
@pytest.mark.slow
def test_the_hopper_kernel_of_weight_gradients_keeps_to_its_registers():
    found = compiled("wgrad", [])
    assert len(found) == 4
    assert max(v["shared"] for v in found) <= 232448
    # A few bytes, of what is looked up once a tile.
    assert max(v["spilled"] for v in found) <= (8 if FEW_SPILLS else 40)
    assert [v for v in found if 3 * v["waits"] > v["products"]] == []


@pytest.mark.every
@pytest.mark.slow
@each_activation(8, 16)
def test_the_hopper_kernel_of_float8_compiles_and_keeps_to_its_registers(names, variants):
    found = compiled("_grouped_float8", names)
    assert len(found) == variants
    assert max(v["shared"] for v in found) <= 227 * 1024
    # Triton 3.6 spills nothing of gated SiLU and of the second product without biases, of others a
    # few bytes. 3.9 spills more; without biases none of it in the loop over K.
    none = {"limit": None, "up_shift": 0.0}
    plain = [v for v in found if Act(**v["ACT"] | none) in (Act("silu"), LINEAR)]
    most = max((v["spilled"] for v in plain if not v["bias"]), default=0)
    assert most <= (0 if FEW_SPILLS else 40)
    assert max(v["spilled"] for v in found) <= (24 if FEW_SPILLS else 280)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "variants"),
    [
        pytest.param(*p, marks=pytest.mark.every)
        for p in ((USED[:1], 20), (USED[1:], 8), (OTHERS, 36))
    ],
    ids=["silu", "gpt_oss", "others"],
)
def test_the_hopper_kernel_by_rows_compiles_and_keeps_to_its_registers(names, variants):
    found = compiled("by_row", names)
    assert len(found) == variants
    assert max(v["shared"] for v in found) <= 232448
    # ptxas waits for no single product.
    assert [v for v in found if 3 * v["waits"] > v["products"]] == []
    # Triton 3.6 spills a pointer of most, which is loaded once a tile; of biases more, and most of
    # gelu. 3.9 spills at most 32 bytes of those of the shipped tables.
    if names != OTHERS:
        assert max(v["spilled"] for v in found) <= (8 if FEW_SPILLS else 40)
    assert max(v["spilled"] for v in found) <= (160 if FEW_SPILLS else 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "variants"),
    [
        (("plain",), 1),
        *(
            pytest.param(*p, marks=pytest.mark.every)
            for p in ((USED, 6), (("formats",), 17), (("tiles",), 24), (OTHERS, 16))
        ),
    ],
    ids=["plain", "used", "formats", "tiles", "others"],
)
def test_the_kernel_of_codes_waits_for_no_single_product(names, variants):
    found = compiled("_grouped_codes", names)
    assert len(found) == variants
    # Triton 3.9 spills 24 bytes for gelu, and of six bits what is loaded once a tile.
    sixes = [v["spilled"] for v in found if v["W"]["bits"] == 6]
    # Two blocks of a processor with 64 tokens each spill what is looked up once a tile.
    pairs = [v["spilled"] for v in found if v["registers"] <= 80]
    assert max(pairs, default=0) <= (24 if FEW_SPILLS else 64)
    others = [v["spilled"] for v in found if v["W"]["bits"] != 6 and v["registers"] > 80]
    assert max(sixes, default=0) <= (0 if FEW_SPILLS else 48)
    assert max(others) <= (24 if names == OTHERS and not FEW_SPILLS else 0)
    assert max(v["shared"] for v in found) <= 232448
    # ptxas puts a wait behind each of them where it cannot tell that registers are not in use.
    assert [v for v in found if 4 * v["waits"] > v["products"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "variants"),
    [
        (("plain",), 1),
        *(
            pytest.param(*p, marks=pytest.mark.every)
            for p in ((USED, 6), (("formats",), 25), (OTHERS, 16))
        ),
    ],
    ids=["plain", "used", "formats", "others"],
)
def test_the_kernel_of_tokens_of_float8_waits_for_no_single_product(names, variants):
    found = compiled("_grouped_float8_tokens", names)
    assert len(found) == variants
    assert max(v["shared"] for v in found) <= 232448
    # Places of lanes that are the same in all tiles, outside the loop over K. In it, of float4,
    # those of scales that are loaded one by one where those of a row fill no words.
    whole = [v for v in found if v["W"]["across"] != 32]
    assert max(v["spilled"] for v in whole or found) <= (32 if FEW_SPILLS else 88)
    assert max(v["spilled"] for v in found) <= (96 if FEW_SPILLS else 224)
    # Where groups of columns have scales each product is waited for, but others are under way.
    assert [v for v in whole if 4 * v["waits"] > v["products"]] == []
