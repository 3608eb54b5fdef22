"""The arguments with defaults that backends of one kind read. What is added to an op is not among
them, so its backends refuse it until they know it."""

from __future__ import annotations

ACTIVATION = ("kind", "gated", "interleaved", "alpha", "limit", "up_shift")
FLOAT_EXPERTS = ("b13_EF", "b2_ED", "expert_map", "expert_offset", "transposed", *ACTIVATION)
EXPERTS = (
    *FLOAT_EXPERTS,
    "w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG", "w_format", "x_format",
)  # fmt: skip
STATIC_SCALES = ("x_scale", "h_scale")
CODES = ("x_scale_TG", "out_dtype")  # of tokens that are codes
SCALED_EXPERTS = (*EXPERTS, "global_scale13_E", "global_scale2_E", *STATIC_SCALES)
WGRAD = ("a_rows_R", "b_rows_R", "out_dtype")
WGRAD_ONTO = ("a_rows_R", "b_rows_R")
FLOAT_GEMM = ("bias_EF", "transposed", "out_dtype")
SCALED_GEMM = (
    *FLOAT_GEMM,
    "x_scale_RG", "w_scale_EFG", "w_zero_EFG", "global_scale_E", "x_global_scale_R", "x_format",
    "w_format",
)  # fmt: skip
ROUTE = (
    "bias_E", "per_expert_scale_E", "score", "select_on", "n_group", "topk_group", "group_reduce",
    "group_fill", "softmax_selected", "renormalize", "eps", "min_sum", "scale", "out_dtype",
)  # fmt: skip
RECORDING = (*ROUTE, "ring_weights_SK")
