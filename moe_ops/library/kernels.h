// The kernels of moe_ops/kernels/cpu, as the ops of this library call them.

#pragma once

#include "records.h"

extern "C" {
void moe_route(const Router*, const float* logits, const float* bias, const float* per_expert_scale, float* weights,
               int32_t* ids);
void moe_local_ids(const Pairs*, const void* ids, const void* map, int32_t* local);
void moe_dispatch(const Pairs*, const char* x, const int32_t* local, char* to, int32_t* rows, int32_t* ends);

#define MOE_DECLARED(dtype)                                                                                      \
  bool moe_gemm_##dtype(const void* w, int64_t expert_stride, int64_t row_stride, int64_t column_stride,         \
                        const void* bias, const void* x, int64_t x_stride, const int32_t* ends, void* y,         \
                        int64_t R, int64_t E, int64_t F, int64_t D, int threads, int32_t least_panel_rows);      \
  void moe_experts_##dtype(const Layer*, const void* x, const void* ids, const void* weights, const void* w13,   \
                           const void* w2, const void* b13, const void* b2, void* out);                          \
  void moe_activate_##dtype(const Activation*, const void* y, int64_t y_stride, int64_t R, int64_t I, void* h,   \
                            int threads);                                                                        \
  void moe_combine_##dtype(const Combined*, const void* y, const void* weights, const int32_t* rows, void* out);
MOE_DECLARED(bfloat16)
MOE_DECLARED(float32)
#undef MOE_DECLARED
}

// `experts` on codes: of an element type of weights and one of inputs, "" for inputs that are floats.
typedef void (*CodedExperts)(const Layer*, const void* x, const void* ids, const void* weights, const void* w13,
                             const void* w2, const Scales* scales13, const Scales* scales2, const Inputs* inputs13,
                             const Inputs* inputs2, const void* b13, const void* b2, void* out);
