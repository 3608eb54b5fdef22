// What the ops ask of their arguments, by torch's stable ABI. An error says the op, what is wanted, what was got and
// what to do.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace moe_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
typedef std::optional<Tensor> MaybeTensor;

// An argument of an op, which owns what it points to. torch's own conversion leaks a copy of each string.
template <typename T> T taken(StableIValue value) {
  if constexpr (std::is_same_v<T, std::string>) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* text = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    const std::string copy(text, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return copy;
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

template <typename... Parts> [[noreturn]] void refuse(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "moe_ops." << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline std::string said(const Tensor& t) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << ")";
  return text.str();
}
inline std::string said(const std::string& text) { return "'" + text + "'"; }
inline std::string said(bool value) { return value ? "True" : "False"; }
inline std::string said(int64_t value) { return std::to_string(value); }
inline std::string said(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}
template <typename T> std::string said(const std::optional<T>& value) { return value ? said(*value) : "None"; }

inline std::string said(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    default: return torch::headeronly::toString(dtype);
  }
}

inline std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// An argument that has a default, and that no code here reads.
template <typename T> [[noreturn]] void refuse_argument(const char* op, const char* name, const T& value) {
  refuse(op, "libmoe_ops does not read ", name, ", got ", said(value), "; leave it out, or call the op from Python");
}

// The checks of one call of an op.
struct Checks {
  const char* op;

  void tensor(const char* name, const Tensor& t, int64_t axes, const std::vector<ScalarType>& dtypes,
              const char* instead = "convert it first") const {
    if (!t.is_cpu()) refuse(op, name, " must be on the CPU, as the first argument is; move it");
    if (t.dim() != axes) refuse(op, name, " must have ", axes, " axes, got shape ", said(t));
    if (std::find(dtypes.begin(), dtypes.end(), t.scalar_type()) != dtypes.end()) return;
    std::vector<std::string> names;
    for (const ScalarType dtype : dtypes) names.push_back(said(dtype));
    refuse(op, name, " must be ", dtypes.size() > 1 ? "one of " : "", listed(names), ", got ", said(t.scalar_type()),
           "; ", instead);
  }

  template <typename... Why>
  void size(const char* name, const Tensor& t, int64_t axis, int64_t want, const Why&... why) const {
    if (t.size(axis) == want) return;
    std::ostringstream text;
    (text << ... << why);
    refuse(op, name, " must have ", want, " (", text.str(), ") on axis ", axis, ", got shape ", said(t));
  }

  // Where a value is among the choices.
  int32_t choice(const char* name, const std::string& value, const std::vector<std::string>& choices) const {
    const auto found = std::find(choices.begin(), choices.end(), value);
    if (found == choices.end()) refuse(op, name, "=", said(value), " is unknown; choose one of ", listed(choices));
    return int32_t(found - choices.begin());
  }

  void finite(const char* name, double value) const {
    if (!std::isfinite(value)) refuse(op, name, "=", value, " must be a finite number");
  }
};

inline const std::vector<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline const std::vector<ScalarType> kServed = {ScalarType::Float, ScalarType::BFloat16};
inline const std::vector<ScalarType> kIndices = {ScalarType::Int, ScalarType::Long};
inline const char* const kServe = "libmoe_ops computes in these: convert the tokens, and the weights with them";

inline ScalarType dtype_of(const Checks& check, const char* name, const std::string& dtype) {
  return kFloats[check.choice(name, dtype, {"float32", "bfloat16", "float16"})];
}

inline Tensor as(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline Tensor with_rows(const Tensor& t) { return t.stride(t.dim() - 1) == 1 ? t : dense(t); }
inline Tensor empty_like_rows(const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::new_empty(t, shape, dtype);
}
inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const MaybeTensor& t) { return t ? t->const_data_ptr() : nullptr; }
template <typename T> T* written(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

inline int32_t threads() { return int32_t(torch::stable::get_num_threads()); }

}  // namespace moe_ops
