// Formats of codes as strings, element:group[:scale], and which of them `experts` multiplies.

#pragma once

#include "arguments.h"
#include "calls.h"
#include "kernels.h"

namespace moe_ops {

constexpr int64_t kAll = -1;

// An element type of codes: how it is stored, and whether it has zero points.
struct Element {
  const char* name;
  ScalarType dtype;
  int64_t values, units;  // so many values in so many units of that dtype
  bool zero;
};
inline constexpr Element kElements[] = {MOE_ELEMENTS};
inline const std::vector<std::string> kScaleNames = {MOE_SCALES};
// Short names, and what they stand for.
inline const std::pair<std::string, std::string> kPublished[] = {MOE_PUBLISHED};
inline const ScalarType kScaleTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Byte};

// The kernel for codes of an element type and inputs of one, "" for floats; null if this library has none.
CodedExperts kernel_of_codes(const std::string& element, const std::string& inputs, bool bfloat16);

struct Format {
  std::string name;
  Element element;
  int64_t group_rows, group_columns;  // that share a scale; kAll: all of them
  int32_t scale;                      // in kScaleNames

  bool whole_rows() const { return group_columns == kAll; }
  bool one_scale() const { return whole_rows() && group_rows == kAll; }
  std::vector<int64_t> scale_shape(int64_t rows, int64_t columns) const {
    return {group_rows == kAll ? 1 : (rows + group_rows - 1) / group_rows,
            whole_rows() ? 1 : (columns + group_columns - 1) / group_columns};
  }
};

// At least one part; what ends with a separator has an empty part behind it.
inline std::vector<std::string> parts_of(const std::string& text, char between) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == between) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

inline int64_t size_of_group(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 10 && std::all_of(text.begin(), text.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
  return digits ? std::stoll(text) : 0;
}

inline Format format_of(const Checks& check, const char* argument, const std::string& name) {
  std::string full = name;
  for (const auto& [published, stands_for] : kPublished)
    if (name == published) full = stands_for;
  const std::vector<std::string> parts = parts_of(full, ':');
  std::vector<std::string> known;
  for (const Element& element : kElements) known.push_back(element.name);
  const auto at = std::find(known.begin(), known.end(), parts[0]);
  if (parts.size() < 2 || parts.size() > 3 || at == known.end())
    refuse(check.op, argument, "=", said(name), ": libmoe_ops multiplies element:group[:scale] with the elements ",
           listed(known), "; take one of these, or call the op from Python");
  Format format{name, kElements[at - known.begin()], kAll, kAll, 0};
  if (parts[1] == "row") format.group_rows = 1;
  else if (parts[1] == "column") format.group_columns = 1;
  else if (parts[1] != "tensor") {
    const std::vector<std::string> sizes = parts_of(parts[1], 'x');
    format.group_rows = sizes.size() == 2 ? size_of_group(sizes[0]) : 0;
    format.group_columns = sizes.size() == 2 ? size_of_group(sizes[1]) : 0;
    if (format.group_rows < 1 || format.group_columns < 1)
      refuse(check.op, argument, "=", said(name), " has the group ", said(parts[1]),
             "; choose tensor, row, column or rows x columns such as 1x128");
  }
  if (parts.size() == 3) format.scale = check.choice("the scale of a format of libmoe_ops", parts[2], kScaleNames);
  return format;
}

// Raises unless the kernels multiply weights of a format, of these widths at most.
inline void check_weight_format(const Checks& check, const Format& format, int64_t width) {
  const int64_t across = format.group_columns;
  if (format.element.units > 1 && across != kAll)  // blocks
    refuse(check.op, "w_format=", said(format.name), " needs one scale above a row of blocks; take the group tensor or row");
  const bool small = across == 32 || across == 64 || across % 128 == 0;
  if (across != kAll && !small && across < width)
    refuse(check.op, "w_format=", said(format.name),
           " needs groups of 32, 64 or a multiple of 128 columns, or of all, in libmoe_ops; call the op from Python");
}

// Raises unless the kernels quantise inputs to a format, for weights of another.
inline void check_input_format(const Checks& check, const Format& inputs, const Format& weights, int64_t width) {
  const std::string element = inputs.element.name;
  const auto no = [&](const auto&... why) {
    refuse(check.op, "x_format=", said(inputs.name), " with w_format=", said(weights.name), ": ", why...,
           "; call the op from Python");
  };
  if ((element != "int8" && element != "float8_e4m3fn") || inputs.scale != 0)
    no("libmoe_ops quantises inputs to int8 and float8_e4m3fn with float32 scales");
  if (!inputs.one_scale() && inputs.group_rows != 1)
    no("inputs want a scale for the tensor, a row, or columns of one row");
  if (element == "int8") {
    const bool whole = weights.whole_rows() && (weights.group_rows == 1 || weights.group_rows == kAll);
    if (std::string(weights.element.name) != "int8" || !whole || !inputs.whole_rows())
      no("int8 inputs want int8 weights, and both one scale a row or tensor");
    if (width > (1 << 17)) no("int32 holds the sum of ", 1 << 17, " products, and there are ", width);
  } else if (!inputs.whole_rows() &&
             (inputs.group_columns % 128 || inputs.group_columns != weights.group_columns)) {
    no("groups of inputs have to be those of the weights, and a multiple of 128 columns");
  }
}

// What is checked and passed on of one weight's scales.
struct Coded {
  Tensor codes, scale;
  MaybeTensor zero;
  Scales scales;

  Coded(const Checks& check, const std::string& name, const Format& format, const Tensor& given,
        const MaybeTensor& scale_given, const MaybeTensor& zero_given, int64_t columns)
      : codes(with_rows(given)),
        scale(checked(check, name + "'s scale", format, scale_given, kScaleTypes[format.scale], columns)), zero() {
    if (format.element.zero) {
      zero = checked(check, name + "'s zero", format, zero_given, ScalarType::Byte, columns);
    } else if (zero_given) {
      refuse(check.op, name, "'s zero was given, but ", said(format.name), " has no zero points; leave it out");
    }
    const int64_t rows = codes.size(1);
    scales = {data(scale), static_cast<const uint8_t*>(data(zero)),
              format.group_rows == kAll ? rows : format.group_rows,
              format.whole_rows() ? columns : format.group_columns, scale.size(1), scale.size(2), format.scale};
  }

 private:
  Tensor checked(const Checks& check, const std::string& name, const Format& format, const MaybeTensor& t,
                 ScalarType dtype, int64_t columns) const {
    std::vector<int64_t> shape = format.scale_shape(codes.size(1), columns);
    shape.insert(shape.begin(), codes.size(0));
    std::ostringstream wanted;
    wanted << said(dtype) << " [" << shape[0] << ", " << shape[1] << ", " << shape[2] << "]";
    if (!t) refuse(check.op, name, " is missing: ", said(format.name), " wants ", wanted.str(), "; give it");
    check.tensor(name.c_str(), *t, 3, {dtype});
    for (int64_t axis = 0; axis < 3; ++axis)
      if (t->size(axis) != shape[axis])
        refuse(check.op, name, " must be ", wanted.str(), ", got shape ", said(*t), "; give those of ",
               said(format.name));
    return dense(*t);
  }
};

}  // namespace moe_ops
