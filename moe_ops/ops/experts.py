"""The experts in one op: dispatch, two matrix products around an activation, combine."""

from __future__ import annotations

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.activate import activate, check_activation
from moe_ops.ops.combine import combine
from moe_ops.ops.dispatch import check as check_dispatch
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.shapes import FLOATS, INDICES, check_devices, check_size, check_tensor
from moe_ops.spec import op


def check(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> None:
    """Raise ValueError or TypeError unless `experts` takes these arguments."""
    plain = b13_EF is b2_ED is expert_map is None and limit is None and not interleaved
    plain = plain and kind == "silu" and gated and alpha == 1.0 and up_shift == 0.0
    if plain and _fits(x_TD, weights_TK, experts_TK, w13_EFD, w2_EDI, transposed):
        return
    check_tensor("x_TD", x_TD, 2, FLOATS)
    check_weights(x_TD, w13_EFD, w2_EDI, b13_EF, b2_ED, transposed, gated)
    check_dispatch(x_TD, experts_TK, w13_EFD.shape[0], expert_map)
    check_tensor("weights_TK", weights_TK, 2, FLOATS)
    check_size("weights_TK", weights_TK, 0, experts_TK.shape[0], "the tokens of experts_TK")
    check_size("weights_TK", weights_TK, 1, experts_TK.shape[1], "the top-k of experts_TK")
    check_activation(kind, gated, interleaved, alpha, limit, up_shift)
    check_devices(x_TD, weights_TK=weights_TK)


def _fits(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    transposed: bool,
) -> bool:
    """Whether a plain layer fits: takes a microsecond, where finding what does not takes five."""
    x, w13, w2, routed = x_TD.shape, w13_EFD.shape, w2_EDI.shape, experts_TK.shape
    if len(x) != 2 or len(w13) != 3 or len(w2) != 3 or len(routed) != 2:
        return False
    F, D, D2, I = (  # noqa: E741
        (w13[2], w13[1], w2[2], w2[1]) if transposed else (w13[1], w13[2], w2[1], w2[2])
    )
    device, dtype = x_TD.device, x_TD.dtype
    return (
        D == D2 == x[1]
        and F == 2 * I
        and w13[0] == w2[0] > 0
        and routed[0] == x[0]
        and routed[1] > 0
        and weights_TK.shape == routed
        and dtype in FLOATS
        and w13_EFD.dtype is dtype is w2_EDI.dtype
        and weights_TK.dtype in FLOATS
        and experts_TK.dtype in INDICES
        and w13_EFD.device == w2_EDI.device == weights_TK.device == experts_TK.device == device
    )


def check_weights(
    x_TD: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None,
    b2_ED: Tensor | None,
    transposed: bool,
    gated: bool,
) -> None:
    """Raise ValueError or TypeError unless the weights and biases fit the tokens and each other."""
    check_tensor("w13_EFD", w13_EFD, 3, (x_TD.dtype,))
    check_tensor("w2_EDI", w2_EDI, 3, (x_TD.dtype,))
    rows, cols = (2, 1) if transposed else (1, 2)
    E, F, D = w13_EFD.shape[0], w13_EFD.shape[rows], x_TD.shape[1]
    if E < 1:
        raise ValueError(f"w13_EFD holds no expert, got shape {tuple(w13_EFD.shape)}")
    check_size("w13_EFD", w13_EFD, cols, D, "the width of x_TD")
    if gated and F % 2:
        raise ValueError(
            f"gated experts need an even number of rows, got w13_EFD {tuple(w13_EFD.shape)}"
        )
    check_size("w2_EDI", w2_EDI, 0, E, "the experts of w13_EFD")
    check_size("w2_EDI", w2_EDI, rows, D, "the width of x_TD")
    check_size("w2_EDI", w2_EDI, cols, F // 2 if gated else F, "the width after the activation")
    for name, bias, size in (("b13_EF", b13_EF, F), ("b2_ED", b2_ED, D)):
        if bias is not None:
            check_tensor(name, bias, 2, FLOATS)
            check_size(name, bias, 0, E, "the experts of w13_EFD")
            check_size(name, bias, 1, size, "the rows of one expert's weight")
    check_devices(x_TD, w13_EFD=w13_EFD, w2_EDI=w2_EDI, b13_EF=b13_EF, b2_ED=b2_ED)


@op(check=check)
def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    """Run every token through its chosen experts: out_t = sum_k w_tk * (W2_e act(W13_e x_t + b13_e)
    + b2_e).

    e = experts_TK[t, k] and w_tk = weights_TK[t, k]; the definition is the composition of
    `dispatch`, `expert_gemm`, `activate`, `expert_gemm` and `combine`, whose docs say what each
    argument does. Pairs whose expert is not here (an id of -1, one not below E, one that the
    expert_map sends to -1) add nothing.

    x_TD: float [T, D]; weights_TK: float [T, K]; experts_TK: int32 or int64 [T, K]; w13_EFD: [E, F,
    D] and w2_EDI: [E, D, I] of x's dtype ([E, D, F] and [E, I, D] if transposed); I = F / 2 if
    gated, else F. Result [T, D] in x's dtype. Raises ValueError or TypeError for wrong shapes,
    dtypes, devices or parameters.
    """
    x_RD, rows_R, ends_E = dispatch(x_TD, experts_TK, w13_EFD.shape[0], expert_map)
    y_RF = expert_gemm(x_RD, w13_EFD, ends_E, b13_EF, transposed)
    h_RI = activate(y_RF, kind, gated, interleaved, alpha, limit, up_shift)
    y_RD = expert_gemm(h_RI, w2_EDI, ends_E, b2_ED, transposed)
    return combine(y_RD, weights_TK, rows_R)


experts.fake(fake_impls.experts)
