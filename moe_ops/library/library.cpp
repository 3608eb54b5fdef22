// libmoe_ops: the schemas of moe_ops and its kernels for CPUs, by torch's stable ABI, for processes without Python, and
// for those with it that load this library before they import moe_ops.

#include "layers.h"

#include <cstdio>

#define MOE_VARIANT(element, inputs, name)                                                                             \
  extern "C" void moe_experts_##name##_bfloat16(const Layer*, const void*, const void*, const void*, const void*,      \
                                                const void*, const Scales*, const Scales*, const Inputs*,              \
                                                const Inputs*, const void*, const void*, void*);                       \
  extern "C" void moe_experts_##name##_float32(const Layer*, const void*, const void*, const void*, const void*,       \
                                               const void*, const Scales*, const Scales*, const Inputs*,               \
                                               const Inputs*, const void*, const void*, void*);
MOE_VARIANTS
#undef MOE_VARIANT

namespace moe_ops {
namespace {

inline void put(StableIValue* stack, const Tensor& t) { stack[0] = torch::stable::detail::from(t); }
template <typename... T> void put(StableIValue* stack, const std::tuple<T...>& results) {
  int64_t at = 0;
  std::apply([&](const auto&... t) { ((stack[at++] = torch::stable::detail::from(t)), ...); }, results);
}

// An op as the dispatcher calls it. With a plan, a further argument, it is what compiled graphs call: backends were
// chosen when they were compiled, and here is one. Those of batch invariant calls begin with this word.
template <typename Call, auto run> void boxed(StableIValue* stack, uint64_t given, uint64_t) {
  Call call = Call::of(stack);
  if (given > Call::kArguments)
    call.batch_invariant = taken<std::string>(stack[Call::kArguments]).rfind("invariant;", 0) == 0;
  put(stack, run(call, Call::kName));
}

template <typename Call> void define(torch::stable::detail::StableLibrary& library) {
  for (const char* schema : {Call::kSchema, Call::kPlanned}) {
#if defined(TORCH_VERSION_2_12_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_12_0  // torch 2.11 knows no 2.12
    library.def(schema, {at::Tag::needs_exact_strides});
#else
    library.def(schema);  // Inductor keeps strides also of ops without tags
#endif
  }
}

template <typename Call, auto run> void implement(torch::stable::detail::StableLibrary& library) {
  library.impl(Call::kName, boxed<Call, run>);
  library.impl((std::string(Call::kName) + ".planned").c_str(), boxed<Call, run>);
}

bool defined = false;

}  // namespace

CodedExperts kernel_of_codes(const std::string& element, const std::string& inputs, bool bfloat16) {
#define MOE_VARIANT(of_element, of_inputs, name)       \
  if (element == of_element && inputs == of_inputs)    \
    return bfloat16 ? moe_experts_##name##_bfloat16 : moe_experts_##name##_float32;
  MOE_VARIANTS
#undef MOE_VARIANT
  return nullptr;
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops, library) {
  try {
    define<RouteCall>(library);
    define<DispatchCall>(library);
    define<ExpertGemmCall>(library);
    define<ActivateCall>(library);
    define<CombineCall>(library);
    define<ExpertsCall>(library);
    define<MoeCall>(library);
    defined = true;
  } catch (const std::exception& error) {  // which must not leave what dlopen runs
    std::fprintf(stderr, "libmoe_ops defines no op, as another definition is in use; load it before import moe_ops, "
                         "and once: %s\n", error.what());
  }
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops, CPU, library) {
  if (!defined) return;
  implement<RouteCall, route>(library);
  implement<DispatchCall, dispatch>(library);
  implement<ExpertGemmCall, expert_gemm>(library);
  implement<ActivateCall, activate>(library);
  implement<CombineCall, combine>(library);
  implement<ExpertsCall, experts>(library);
  implement<MoeCall, moe>(library);
}

}  // namespace moe_ops

// What this library was built from, as Python asks before it uses it.
extern "C" __attribute__((visibility("default"))) const char* moe_ops_built_from() { return MOE_BUILT_FROM; }
