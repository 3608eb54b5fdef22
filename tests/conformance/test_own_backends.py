"""Our own backends that run on a CPU pass what backends of others have to pass."""

from __future__ import annotations

import pytest
import torch

from moe_ops.conformance import Only, check_backend, examine
from moe_ops.conformance.call import Call
from moe_ops.conformance.decode_samples import DECODE_MAKERS
from moe_ops.conformance.kit import BY_NAME
from moe_ops.conformance.samples import samples
from moe_ops.registry.spec import DECODE_OPS, OPS
from moe_ops.testing import BF16

EVERY = OPS | DECODE_OPS
# Those that run other calls, too, and those of invariant calls alone.
RUNS = [
    (op, b.name)
    for op, o in EVERY.items()
    for b in o.backends.values()
    if b.devices is None or "cpu" in b.devices
]
further = [pytest.mark.slow, pytest.mark.every]


@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(*run, marks=[] if run[1] == "cpu" else further) for run in RUNS],
)
def test_backend_passes(op: str, name: str) -> None:
    check_backend(op, name)


@pytest.mark.parametrize("op", DECODE_OPS)
def test_definitions_of_decode_ops_pass_in_16_bits(op: str) -> None:
    report = examine(op, "reference", only=Only(sample="one_token/bfloat16", check="numbers"))
    assert report.sound, str(report)


def test_there_are_samples_of_every_op() -> None:
    assert set(DECODE_MAKERS) == set(DECODE_OPS)
    for op in EVERY:
        assert samples(op, BY_NAME["one_token"], BF16), op


def test_what_the_host_reads_stays_on_a_cpu() -> None:
    op, case = OPS["combine_tokens"], BY_NAME["one_token"]
    backend = op.named("reference")
    assert backend is not None
    for sample in samples(op.name, case, BF16):
        call = Call(
            op=op, backend=backend, case=case, dtype=BF16, label=sample.name, loaded=sample.args,
            device=torch.device("meta"),
        )  # fmt: skip
        copies = op.arguments.by_name(op.call(*call.copies()))
        assert copies["splits_2R"].is_cpu and copies["y_GD"].is_meta
