"""Element types: a file for each width of floats and of integers, with all that their codes mean.

Which elements there are, their storage and the names of published formats are what these files
register; the order of the imports is that of lists in messages and pages. CONTRIBUTING.md says how
to add one, here or from outside the package.
"""

from moe_ops.quant.elements import float8, float6, float4, int8, int4, nf4, k_quants  # noqa: F401, I001  (in order)
