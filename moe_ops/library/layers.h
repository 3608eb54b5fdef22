// `experts` and `moe` as ops, each given the record of a call (calls.h).

#pragma once

#include "formats.h"
#include "stages.h"

namespace moe_ops {

// The sizes of a call of `experts`, checked.
struct Sizes {
  int64_t T, K, E, F, D, I;
};

inline void check_offset(const Checks& check, std::optional<int64_t> offset, const MaybeTensor& expert_map, int64_t E) {
  if (!offset) return;
  if (!expert_map) refuse(check.op, "expert_offset=", *offset, " goes with an expert_map; give both");
  const int64_t last = expert_map->numel() - E;
  if (*offset < 0 || *offset > last)
    refuse(check.op, "expert_offset=", *offset, " must be from 0 to ", last, ", as ", E, " of the ",
           expert_map->numel(), " experts of expert_map are here");
}

inline Sizes sizes_of(const Checks& check, const ExpertsCall& c, int64_t values, int64_t units) {
  const int64_t rows = c.transposed ? 2 : 1, columns = 3 - rows;
  const int64_t T = c.x_TD.size(0), D = c.x_TD.size(1), E = c.w13_EFD.size(0), F = c.w13_EFD.size(rows);
  if (E < 1) refuse(check.op, "w13_EFD holds no expert, got shape ", said(c.w13_EFD), "; give one expert or more");
  if (c.gated && F % 2)
    refuse(check.op, "gated experts need an even number of rows, got w13_EFD ", said(c.w13_EFD),
           "; give as many of the gate as of up, or gated=False");
  const int64_t I = c.gated ? F / 2 : F;
  for (const int64_t width : {D, I})
    if (width % values)
      refuse(check.op, "w_format=", said(c.w_format), " packs ", values, " values together; pad the width ", width);
  const std::string in = c.w_format.empty() ? "" : " packed as " + said(c.w_format);
  check.size("w13_EFD", c.w13_EFD, columns, D / values * units, "the width of x_TD", in);
  check.size("w2_EDI", c.w2_EDI, 0, E, "the experts of w13_EFD");
  check.size("w2_EDI", c.w2_EDI, rows, D, "the width of x_TD");
  check.size("w2_EDI", c.w2_EDI, columns, I / values * units, "the width after the activation", in);
  check_pairs(check, c.x_TD, c.ids_TK);
  check.tensor("weights_TK", c.weights_TK, 2, kFloats);
  check.size("weights_TK", c.weights_TK, 0, T, "the tokens of ids_TK");
  check.size("weights_TK", c.weights_TK, 1, c.ids_TK.size(1), "the top-k of ids_TK");
  check_offset(check, c.expert_offset, c.expert_map, E);
  return {T, c.ids_TK.size(1), E, F, D, I};
}

// What both kinds of kernels are given: tensors as they read them, held until they are done.
struct Routed {
  Tensor x, weights, ids, out;
  MaybeTensor b13, b2;
  Layer layer;

  Routed(const Checks& check, const ExpertsCall& c, const Sizes& s, const Tensor& tokens)
      : x(with_rows(tokens)), weights(routing_weights(c.weights_TK, tokens.scalar_type())),
        ids(c.expert_map ? local_ids(check, c.ids_TK, s.E, c.expert_map) : dense(c.ids_TK)),
        out(empty_like_rows(tokens, {s.T, s.D}, tokens.scalar_type())),
        b13(bias_like(check, "b13_EF", c.b13_EF, s.E, s.F, tokens.scalar_type())),
        b2(bias_like(check, "b2_ED", c.b2_ED, s.E, s.D, tokens.scalar_type())),
        layer{s.T, s.K, s.E, s.F, s.D, s.I, x.stride(0), 0, 0, 0, 0, 1, 1,
              ids.scalar_type() == ScalarType::Long, weights.scalar_type() == ScalarType::Float, threads(),
              least_panel_rows(c.batch_invariant, !c.w_format.empty()),
              activation_of(check, c)} {}
};

inline Tensor plain_experts(const Checks& check, const ExpertsCall& c) {
  const std::pair<const char*, const MaybeTensor&> of_codes[] = {
      {"w13_scale_EFG", c.w13_scale_EFG}, {"w2_scale_EDG", c.w2_scale_EDG}, {"w13_zero_EFG", c.w13_zero_EFG},
      {"w2_zero_EDG", c.w2_zero_EDG}, {"x_scale", c.x_scale}, {"h_scale", c.h_scale}, {"x_scale_TG", c.x_scale_TG}};
  for (const auto& [name, t] : of_codes)
    if (t) refuse(check.op, name, " was given without w_format; name it");
  if (!c.x_format.empty())
    refuse(check.op, "x_format=", said(c.x_format), " wants a quantised weight too: name its w_format");
  if (!c.out_dtype.empty())
    refuse(check.op, "out_dtype=", said(c.out_dtype), " goes with tokens that are codes; leave it out");
  check.tensor("x_TD", c.x_TD, 2, kServed, kServe);
  const ScalarType dtype = c.x_TD.scalar_type();
  check.tensor("w13_EFD", c.w13_EFD, 3, {dtype}, "convert it first, or name the w_format of codes");
  check.tensor("w2_EDI", c.w2_EDI, 3, {dtype}, "convert it first, or name the w_format of codes");
  const Sizes s = sizes_of(check, c, 1, 1);
  Routed r(check, c, s, c.x_TD);
  const Strided w13(c.w13_EFD, c.transposed), w2(c.w2_EDI, c.transposed);
  Layer& l = r.layer;
  l.w13_expert_stride = w13.expert_stride, l.w13_row_stride = w13.row_stride, l.w13_column_stride = w13.column_stride;
  l.w2_expert_stride = w2.expert_stride, l.w2_row_stride = w2.row_stride, l.w2_column_stride = w2.column_stride;
  const auto run = dtype == ScalarType::Float ? moe_experts_float32 : moe_experts_bfloat16;
  run(&l, data(r.x), data(r.ids), data(r.weights), data(w13.w), data(w2.w), data(r.b13), data(r.b2),
      written<void>(r.out));
  return r.out;
}

// The scales of the inputs of one product, `columns` wide: static ones, those that come with codes, or none.
inline Inputs inputs_of(const std::optional<Format>& format, int64_t columns, const MaybeTensor& fixed,
                        const MaybeTensor& of_rows) {
  if (!format) return {nullptr, 0, nullptr, columns, 0};
  const int64_t across = format->group_columns;
  return {static_cast<const float*>(data(fixed)), fixed ? fixed->numel() : 0, static_cast<const float*>(data(of_rows)),
          across == kAll || across > columns ? columns : across, format->group_rows == kAll};
}

inline MaybeTensor static_scale(const Checks& check, const char* name, const MaybeTensor& scale,
                                const std::optional<Format>& format, int64_t E) {
  if (!scale) return scale;
  if (!format || !format->one_scale())
    refuse(check.op, name, " goes with an x_format of one scale for the tensor; leave it out");
  if (scale->scalar_type() != ScalarType::Float || !scale->is_cpu() || (scale->numel() != 1 && scale->numel() != E))
    refuse(check.op, name, " must be one float32, or one for each of the ", E, " experts here, got ", said(*scale),
           " of ", said(scale->scalar_type()), "; convert it");
  return dense(*scale);
}

// The tokens as floats, those that are codes as the numbers that these stand for.
inline Tensor tokens_of(const Checks& check, const ExpertsCall& c, const std::optional<Format>& inputs) {
  if (!c.x_scale_TG && c.out_dtype.empty()) {
    check.tensor("x_TD", c.x_TD, 2, kServed, kServe);
    return c.x_TD;
  }
  if (!inputs || inputs->one_scale() || c.x_scale || !c.x_scale_TG)
    refuse(check.op, "x_scale_TG and out_dtype go together, with an x_format of a scale a row or group; ",
           "give floats, and neither");
  check.tensor("x_TD", c.x_TD, 2, {inputs->element.dtype});
  const ScalarType dtype = dtype_of(check, "out_dtype", c.out_dtype);
  if (dtype == ScalarType::Half)
    refuse(check.op, "out_dtype='float16' is not computed by libmoe_ops; take bfloat16 or float32");
  check.tensor("x_scale_TG", *c.x_scale_TG, 2, {ScalarType::Float});
  check.size("x_scale_TG", *c.x_scale_TG, 0, c.x_TD.size(0), "the tokens of x_TD");
  const int64_t groups = inputs->scale_shape(1, c.x_TD.size(1))[1];
  check.size("x_scale_TG", *c.x_scale_TG, 1, groups, "the groups of ", said(c.x_format));
  return as(c.x_TD, dtype);
}

inline Tensor coded_experts(const Checks& check, const ExpertsCall& c) {
  const Format weights = format_of(check, "w_format", c.w_format);
  std::optional<Format> inputs;
  if (!c.x_format.empty()) inputs = format_of(check, "x_format", c.x_format);
  const Tensor tokens = tokens_of(check, c, inputs);
  if (c.transposed)
    refuse(check.op, "w13_EFD is transposed; quantised weights want their rows to be outputs: store them so");
  for (const auto& [name, w] : {std::pair<const char*, const Tensor&>{"w13_EFD", c.w13_EFD}, {"w2_EDI", c.w2_EDI}})
    check.tensor(name, w, 3, {weights.element.dtype}, "give the codes of w_format, or name the format of these");
  const Sizes s = sizes_of(check, c, weights.element.values, weights.element.units);
  check_weight_format(check, weights, std::max(s.D, s.I));
  if (inputs) check_input_format(check, *inputs, weights, std::max(s.D, s.I));
  const MaybeTensor x_scale = static_scale(check, "x_scale", c.x_scale, inputs, s.E);
  const MaybeTensor h_scale = static_scale(check, "h_scale", c.h_scale, inputs, s.E);
  MaybeTensor of_rows;
  if (c.x_scale_TG) of_rows = dense(*c.x_scale_TG);
  const std::string of_inputs = inputs ? inputs->element.name : "";
  const auto run = kernel_of_codes(weights.element.name, of_inputs, tokens.scalar_type() == ScalarType::BFloat16);
  if (!run)
    refuse(check.op, "w_format=", said(c.w_format), inputs ? " with x_format=" + said(c.x_format) : "",
           ": this libmoe_ops was built without it; build it with python -m moe_ops build-library DIR");
  Routed r(check, c, s, tokens);
  const Coded w13(check, "w13_EFD", weights, c.w13_EFD, c.w13_scale_EFG, c.w13_zero_EFG, s.D);
  const Coded w2(check, "w2_EDI", weights, c.w2_EDI, c.w2_scale_EDG, c.w2_zero_EDG, s.I);
  r.layer.w13_expert_stride = w13.codes.stride(0), r.layer.w13_row_stride = w13.codes.stride(1);
  r.layer.w2_expert_stride = w2.codes.stride(0), r.layer.w2_row_stride = w2.codes.stride(1);
  const Inputs of_x = inputs_of(inputs, s.D, x_scale, of_rows), of_h = inputs_of(inputs, s.I, h_scale, std::nullopt);
  run(&r.layer, data(r.x), data(r.ids), data(r.weights), data(w13.codes), data(w2.codes), &w13.scales, &w2.scales,
      &of_x, &of_h, data(r.b13), data(r.b2), written<void>(r.out));
  return r.out;
}

inline Tensor experts(const ExpertsCall& c, const char* op) {
  c.refuse_unread(op);
  const Checks check{op};
  if (c.x_TD.dim() != 2 || c.w13_EFD.dim() != 3 || c.w2_EDI.dim() != 3)
    refuse(op, "x_TD, w13_EFD and w2_EDI must have 2, 3 and 3 axes, got shapes ", said(c.x_TD), ", ", said(c.w13_EFD),
           " and ", said(c.w2_EDI), "; reshape them");
  return c.w_format.empty() ? plain_experts(check, c) : coded_experts(check, c);
}

inline Tensor moe(const MoeCall& c, const char* op) {
  const Checks check{op};
  check.tensor("x_TD", c.x_TD, 2, kServed, kServe);
  check.tensor("logits_TE", c.logits_TE, 2, kFloats);
  check.size("logits_TE", c.logits_TE, 0, c.x_TD.size(0), "the tokens of x_TD");
  if (c.expert_map) {
    check.tensor("expert_map", *c.expert_map, 1, kIndices);
    check.size("expert_map", *c.expert_map, 0, c.logits_TE.size(1), "the experts of logits_TE");
  } else {
    check.size("logits_TE", c.logits_TE, 1, c.w13_EFD.dim() ? c.w13_EFD.size(0) : 0,
               "the experts of w13_EFD, as there is no expert_map");
  }
  const auto [weights_TK, ids_TK] = route(c.routing(), op);
  ExpertsCall layer = c.layer(weights_TK, ids_TK);
  layer.batch_invariant = c.batch_invariant;
  return experts(layer, op);
}

}  // namespace moe_ops
