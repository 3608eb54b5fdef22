// What a call of the kernels is told beside its tensors. Compiled in front of layer.h and of route.cpp; Python has the
// same fields by position (kernels/cpu/__init__.py, quantized.py, stages.py), and libmoe_ops includes this file.

#ifndef MOE_OPS_RECORDS_H
#define MOE_OPS_RECORDS_H

#include <cstdint>

struct Activation {
  int32_t kind;  // 0 silu, 1 gelu, 2 gelu_tanh, 3 relu2
  int32_t gated, interleaved, clamped;
  float alpha, limit, up_shift;
};

// Strides count numbers, or stored units of codes. One of a weight's rows and columns lies with a stride of 1.
struct Layer {
  int64_t T, K, E, F, D, I;
  int64_t x_stride, w13_expert_stride, w13_row_stride, w2_expert_stride, w2_row_stride;
  int64_t w13_column_stride, w2_column_stride;
  int32_t ids_are_int64, weights_are_float32, threads;
  int32_t least_panel_rows;  // of an expert, from which on panels multiply; 0: where they are faster
  Activation activation;
};

struct Router {
  int64_t T, E, K, n_group, topk_group;
  int32_t score;  // 0 softmax, 1 sigmoid, 2 sqrtsoftplus, 3 logit
  int32_t select_on_logit, group_top2sum, fill, softmax_selected, renormalize, threads;
  // fill: 0 -inf, 1 zero, 2 zero_weight
  float eps, min_sum, scale;
};

// The scales of one stacked weight [E, rows, columns].
struct Scales {
  const void* scale;
  const uint8_t* zero;
  int64_t group_rows, group_columns;   // that share a scale
  int64_t row_groups, column_groups;   // of one expert
  int32_t kind;                        // 0 float32, 1 bfloat16, 2 float16, 3 e8m0
};

// How the inputs of a product get their scales.
struct Inputs {
  const float* given;     // one, or one for each expert; null: they are made of the values
  int64_t given_experts;  // how many are given
  const float* of_rows;   // [rows, groups] of codes that are given as the numbers that they stand for; or null
  int64_t group_columns;  // that share a scale
  int32_t one;            // whether all rows share one
};

// Pairs of tokens and experts, T * K of them, and the experts here.
struct Pairs {
  int64_t T, K, E;
  int64_t global_experts;  // that a map knows; 0: ids are those of the experts here
  int64_t row_bytes, x_stride_bytes;
  int32_t ids_are_int64, map_is_int64, threads;
};

struct Combined {
  int64_t T, K, D, y_stride;
  int32_t weights_are_float32, threads;
};

#endif
