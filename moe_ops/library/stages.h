// The stages of a layer as ops, each given the record of a call (calls.h).

#pragma once

#include "arguments.h"
#include "calls.h"
#include "kernels.h"

namespace moe_ops {

inline void check_groups(const Checks& check, const RouteCall& c, int64_t E) {
  const int64_t n = c.n_group;
  if (n == 1 && c.topk_group == 1) return;
  if (n < 1 || E % n) refuse(check.op, "n_group=", n, " must divide the ", E, " experts of logits_TE");
  if (c.topk_group < 1 || c.topk_group > n)
    refuse(check.op, "topk_group=", c.topk_group, " must be from 1 to n_group=", n);
  if (c.group_reduce == "top2sum" && n == E)
    refuse(check.op, "group_reduce='top2sum' needs two experts a group, got ", E, " experts in ", n, " groups");
  const int64_t kept = n == 1 ? E : c.topk_group * (E / n);
  if (c.group_fill == "-inf" && c.top_k > kept)
    refuse(check.op, "top_k=", c.top_k, " exceeds the ", kept, " experts of topk_group=", c.topk_group, " groups");
}

inline MaybeTensor of_experts(const Checks& check, const char* name, const MaybeTensor& t, int64_t E) {
  if (!t) return t;
  check.tensor(name, *t, 1, kFloats);
  check.size(name, *t, 0, E, "one per expert of logits_TE");
  return dense(as(*t, ScalarType::Float));
}

inline std::tuple<Tensor, Tensor> route(const RouteCall& c, const char* op) {
  c.refuse_unread(op);
  const Checks check{op};
  check.tensor("logits_TE", c.logits_TE, 2, kFloats);
  const int64_t T = c.logits_TE.size(0), E = c.logits_TE.size(1);
  if (c.top_k < 1 || c.top_k > E)
    refuse(op, "top_k=", c.top_k, " must be from 1 to the ", E, " experts of logits_TE; lower top_k");
  const int32_t score = check.choice("score", c.score, {"softmax", "sigmoid", "sqrtsoftplus", "logit"});
  const int32_t on_logit = check.choice("select_on", c.select_on, {"score", "logit"});
  const int32_t top2sum = check.choice("group_reduce", c.group_reduce, {"max", "top2sum"});
  const int32_t fill = check.choice("group_fill", c.group_fill, {"-inf", "zero", "zero_weight"});
  const ScalarType dtype = dtype_of(check, "out_dtype", c.out_dtype);
  check_groups(check, c, E);
  check.finite("eps", c.eps);
  check.finite("min_sum", c.min_sum);
  check.finite("scale", c.scale);
  if (c.softmax_selected && c.renormalize)
    refuse(op, "softmax_selected already makes weights that sum to 1; drop renormalize");
  const MaybeTensor bias = of_experts(check, "bias_E", c.bias_E, E);
  const MaybeTensor factors = of_experts(check, "per_expert_scale_E", c.per_expert_scale_E, E);
  const Tensor logits = dense(as(c.logits_TE, ScalarType::Float));
  const Tensor weights = empty_like_rows(logits, {T, c.top_k}, ScalarType::Float);
  const Tensor ids = empty_like_rows(logits, {T, c.top_k}, ScalarType::Int);
  const Router router{T, E, c.top_k, c.n_group, c.topk_group, score, on_logit, top2sum, fill, c.softmax_selected,
                      c.renormalize, threads(), float(c.eps), float(c.min_sum), float(c.scale)};
  moe_route(&router, static_cast<const float*>(data(logits)), static_cast<const float*>(data(bias)),
            static_cast<const float*>(data(factors)), written<float>(weights), written<int32_t>(ids));
  return {as(weights, dtype), ids};
}

// The experts here of the pairs that ids name, -1 for those that are not here.
inline Tensor local_ids(const Checks& check, const Tensor& ids_TK, int64_t E, const MaybeTensor& expert_map) {
  const Tensor ids = dense(ids_TK);
  Pairs pairs{ids.size(0), ids.size(1), E, 0, 0, 0, ids.scalar_type() == ScalarType::Long, 0, threads()};
  MaybeTensor map;
  if (expert_map) {
    check.tensor("expert_map", *expert_map, 1, kIndices);
    pairs.global_experts = expert_map->size(0);
    if (pairs.global_experts < 1)
      refuse(check.op, "expert_map is empty; it must hold a local id, or -1, for each global expert");
    map = dense(*expert_map);
    pairs.map_is_int64 = map->scalar_type() == ScalarType::Long;
  }
  const Tensor local = empty_like_rows(ids, {ids.size(0), ids.size(1)}, ScalarType::Int);
  moe_local_ids(&pairs, data(ids), data(map), written<int32_t>(local));
  return local;
}

inline void check_pairs(const Checks& check, const Tensor& x_TD, const Tensor& ids_TK) {
  check.tensor("ids_TK", ids_TK, 2, kIndices);
  check.size("ids_TK", ids_TK, 0, x_TD.size(0), "the tokens of x_TD");
  if (ids_TK.size(1) < 1) refuse(check.op, "ids_TK must name at least one expert a token, got shape ", said(ids_TK));
}

inline std::tuple<Tensor, Tensor, Tensor> dispatch(const DispatchCall& c, const char* op) {
  c.refuse_unread(op);
  const Checks check{op};
  check.tensor("x_TD", c.x_TD, 2, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
               ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2, ScalarType::Byte, ScalarType::Char});
  check_pairs(check, c.x_TD, c.ids_TK);
  constexpr int64_t most = (int64_t(1) << 31) - 1;  // an id is at most an int32
  if (c.num_experts < 1) refuse(op, "num_experts=", c.num_experts, " must be at least 1");
  if (c.num_experts > most) refuse(op, "num_experts=", c.num_experts, " must be at most ", most);
  const Tensor local = local_ids(check, c.ids_TK, c.num_experts, c.expert_map), x = with_rows(c.x_TD);
  const int64_t bytes = int64_t(x.element_size()), T = local.size(0), K = local.size(1), D = x.size(1);
  const Tensor x_RD = empty_like_rows(x, {T * K, D}, x.scalar_type());
  const Tensor rows = empty_like_rows(x, {T * K}, ScalarType::Int);
  const Tensor ends = empty_like_rows(x, {c.num_experts}, ScalarType::Int);
  const Pairs pairs{T, K, c.num_experts, 0, D * bytes, x.stride(0) * bytes, 0, 0, threads()};
  moe_dispatch(&pairs, static_cast<const char*>(data(x)), static_cast<const int32_t*>(data(local)),
               written<char>(x_RD), written<int32_t>(rows), written<int32_t>(ends));
  return {x_RD, rows, ends};
}

// A stacked weight whose rows or columns lie with a stride of 1, and its strides from output to output and from input
// to input. A copy if neither does.
struct Strided {
  Tensor w;
  int64_t outputs, expert_stride, row_stride, column_stride;

  Strided(const Tensor& given, bool transposed) : w(given) {
    const int64_t rows = transposed ? 2 : 1, columns = 3 - rows;
    const auto stride = [&](int64_t axis) { return w.size(axis) == 1 ? 1 : w.stride(axis); };
    if (stride(rows) != 1 && stride(columns) != 1) w = dense(w);
    outputs = w.size(rows);
    expert_stride = w.stride(0);
    row_stride = w.stride(rows);
    column_stride = stride(columns);
  }
};

inline MaybeTensor bias_like(const Checks& check, const char* name, const MaybeTensor& bias, int64_t E, int64_t rows,
                             ScalarType dtype) {
  if (!bias) return bias;
  check.tensor(name, *bias, 2, kFloats);
  check.size(name, *bias, 0, E, "the experts of the weight");
  check.size(name, *bias, 1, rows, "the rows of one expert's weight");
  if (bias->scalar_type() != dtype && dtype != ScalarType::Float)  // which would round it
    refuse(check.op, name, " must have the dtype of the tokens, ", said(dtype), ", got ", said(bias->scalar_type()),
           "; convert it once, ahead of the calls");
  return dense(as(*bias, dtype));
}

[[noreturn]] inline void refuse_ends(const char* op, const Tensor& ends, int64_t R) {
  const auto* end = static_cast<const int32_t*>(data(ends));
  int64_t e = 0, start = 0;
  for (; e + 1 < ends.size(0) && end[e] >= start && end[e] <= R; ++e) start = end[e];
  refuse(op, "ends_E must ascend within the ", R, " rows of x_RD, got ends_E[", e, "] = ", end[e], " where ", start,
         " to ", R, " would do; give each expert one past its last row");
}

// From how many rows of an expert on panels multiply, as moe_ops/backends/cpu_panels.py has it.
inline int32_t least_panel_rows(bool batch_invariant, bool codes) {
  if (!batch_invariant) return 0;
  return codes ? std::numeric_limits<int32_t>::max() : 1;
}

inline Tensor expert_gemm(const ExpertGemmCall& c, const char* op) {
  if (!c.w_format.empty())
    refuse(op, "libmoe_ops multiplies codes in `experts` alone, got w_format=", said(c.w_format),
           "; call that, decode the weight, or call the op from Python");
  c.refuse_unread(op);
  const Checks check{op};
  check.tensor("x_RD", c.x_RD, 2, kServed, kServe);
  const ScalarType dtype = c.x_RD.scalar_type();
  check.tensor("w_EFD", c.w_EFD, 3, {dtype}, "of codes call `experts`, which multiplies them; else convert it first");
  check.tensor("ends_E", c.ends_E, 1, {ScalarType::Int});
  const int64_t R = c.x_RD.size(0), D = c.x_RD.size(1), E = c.w_EFD.size(0);
  check.size("w_EFD", c.w_EFD, c.transposed ? 1 : 2, D, "the width of x_RD");
  if (E < 1) refuse(op, "w_EFD holds no expert, got shape ", said(c.w_EFD), "; give one weight or more");
  check.size("ends_E", c.ends_E, 0, E, "the experts of w_EFD");
  if (!c.out_dtype.empty() && dtype_of(check, "out_dtype", c.out_dtype) != dtype)
    refuse(op, "out_dtype must be that of x_RD, ", said(dtype), ", got ", said(c.out_dtype), "; leave it out");
  const Strided w(c.w_EFD, c.transposed);
  const MaybeTensor bias = bias_like(check, "bias_EF", c.bias_EF, E, w.outputs, dtype);
  const Tensor x = with_rows(c.x_RD), ends = dense(c.ends_E);
  const Tensor y = empty_like_rows(x, {R, w.outputs}, dtype);
  const auto run = dtype == ScalarType::Float ? moe_gemm_float32 : moe_gemm_bfloat16;
  if (!run(data(w.w), w.expert_stride, w.row_stride, w.column_stride, data(bias), data(x), x.stride(0),
           static_cast<const int32_t*>(data(ends)), written<void>(y), R, E, w.outputs, D, threads(),
           least_panel_rows(c.batch_invariant, false)))
    refuse_ends(op, ends, R);
  return y;
}

// The activation that a record of `activate` or of `experts` names.
template <typename Call> Activation activation_of(const Checks& check, const Call& c) {
  const int32_t kind = check.choice("kind", c.kind, {"silu", "gelu", "gelu_tanh", "relu2"});
  check.finite("alpha", c.alpha);
  check.finite("up_shift", c.up_shift);
  if (kind != 0 && c.alpha != 1.0)
    refuse(check.op, "alpha=", c.alpha, " goes with kind='silu', got kind=", said(c.kind));
  if (c.limit && !(*c.limit > 0)) refuse(check.op, "limit=", *c.limit, " must be positive, or None for no clamp");
  if (!c.gated && (c.interleaved || c.up_shift != 0.0))
    refuse(check.op, "interleaved and up_shift speak of the `up` half, which an ungated activation has not");
  return {kind, c.gated, c.interleaved, c.limit.has_value(), float(c.alpha), float(c.limit.value_or(0.0)),
          float(c.up_shift)};
}

inline Tensor activate(const ActivateCall& c, const char* op) {
  c.refuse_unread(op);
  const Checks check{op};
  check.tensor("y_RF", c.y_RF, 2, kServed, kServe);
  const Activation act = activation_of(check, c);
  if (c.gated && c.y_RF.size(1) % 2)
    refuse(op, "a gated activation halves the width of y_RF, which is odd: ", said(c.y_RF));
  const Tensor y = with_rows(c.y_RF);
  const int64_t R = y.size(0), I = c.gated ? y.size(1) / 2 : y.size(1);
  const Tensor h = empty_like_rows(y, {R, I}, y.scalar_type());
  const auto run = y.scalar_type() == ScalarType::Float ? moe_activate_float32 : moe_activate_bfloat16;
  run(&act, data(y), y.stride(0), R, I, written<void>(h), threads());
  return h;
}

// Routing weights as they are multiplied with outputs of a dtype: in float32, or in that dtype.
inline Tensor routing_weights(const Tensor& weights_TK, ScalarType dtype) {
  return dense(weights_TK.scalar_type() == dtype ? weights_TK : as(weights_TK, ScalarType::Float));
}

inline Tensor combine(const CombineCall& c, const char* op) {
  c.refuse_unread(op);
  const Checks check{op};
  check.tensor("y_RD", c.y_RD, 2, kServed, kServe);
  check.tensor("weights_TK", c.weights_TK, 2, kFloats);
  check.tensor("rows_R", c.rows_R, 1, {ScalarType::Int});
  const int64_t T = c.weights_TK.size(0), K = c.weights_TK.size(1), D = c.y_RD.size(1);
  check.size("y_RD", c.y_RD, 0, T * K, "tokens times top-k of weights_TK");
  check.size("rows_R", c.rows_R, 0, T * K, "tokens times top-k of weights_TK");
  const ScalarType dtype = c.y_RD.scalar_type();
  const Tensor y = with_rows(c.y_RD), rows = dense(c.rows_R), weights = routing_weights(c.weights_TK, dtype);
  const Tensor out = empty_like_rows(y, {T, D}, dtype);
  const Combined combined{T, K, D, y.stride(0), weights.scalar_type() == ScalarType::Float, threads()};
  const auto run = dtype == ScalarType::Float ? moe_combine_float32 : moe_combine_bfloat16;
  run(&combined, data(y), data(weights), static_cast<const int32_t*>(data(rows)), written<void>(out));
  return out;
}

}  // namespace moe_ops
