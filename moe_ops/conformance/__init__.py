"""Whether a backend does what its op says: samples, and checks that each backend has to pass.

`check_backend(op, name)` is for tests, `python -m moe_ops conformance NAME` for a terminal, and
`moe_ops.conformance.plugin` for pytest.
"""

from moe_ops.conformance.kit import Only, check_backend, examine
from moe_ops.conformance.report import Failure, Report

__all__ = ["Failure", "Only", "Report", "check_backend", "examine"]
