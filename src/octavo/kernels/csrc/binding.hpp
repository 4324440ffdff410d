// What the Python binding is made of: array types, checks, memory that grows, and packed matrices. It does not compute.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernel_table.hpp"
#include "pack_groups.hpp"
#include "pack_linear.hpp"
#include "weight_memory.hpp"

namespace octavo {

namespace nb = nanobind;

using CF1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CF2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CF3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using F3 = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using CD2 = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using D1 = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using I1 = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CUL1 = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CI1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CI2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using L2 = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CU2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using U1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// 64-byte aligned memory that grows and is never initialised.
class Buffer {
 public:
  explicit Buffer(size_t bytes = 0) { reserve(bytes); }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

struct Linear {
  WeightPiece packed;
  Buffer bias;
  LinearWeights weights{};
  size_t num_bytes = 0;
};

inline WeightsDtype weights_dtype(const std::string& name) {
  if (name == "f32") return WeightsDtype::f32;
  if (name == "bf16") return WeightsDtype::bf16;
  if (name == "int8") return WeightsDtype::int8;
  if (name == "int4") return WeightsDtype::int4;
  throw std::invalid_argument("weights dtype '" + name + "' is not one of f32, bf16, int8, int4");
}

inline const char* name_of(WeightsDtype dtype) {
  switch (dtype) {
    case WeightsDtype::f32: return "f32";
    case WeightsDtype::bf16: return "bf16";
    case WeightsDtype::int8: return "int8";
    default: return "int4";
  }
}

inline BlockKind block_kind(const std::string& name) {
  if (name == "q8_0") return BlockKind::q8_0;
  if (name == "q4_0") return BlockKind::q4_0;
  if (name == "q4_1") return BlockKind::q4_1;
  throw std::invalid_argument("blocks of '" + name + "' are not one of q8_0, q4_0, q4_1");
}

// Memory for a matrix and its bias, which is filled in.
inline std::unique_ptr<Linear> new_linear(WeightMemory& memory, int num_outputs, int num_inputs, WeightsDtype type,
                                          const std::optional<CF1>& bias) {
  require(num_outputs >= 1 && num_inputs >= 1, "a weight matrix must not be empty");
  auto linear = std::make_unique<Linear>();
  linear->num_bytes = type >= WeightsDtype::int8 ? packed_groups_bytes(num_outputs, num_inputs, type)
                                                 : packed_linear_bytes(num_outputs, num_inputs, type);
  linear->packed = memory.take(linear->num_bytes);
  linear->weights = {linear->packed.data, nullptr, num_outputs, num_inputs, type};
  if (bias) {
    require(bias->shape(0) == static_cast<size_t>(num_outputs), "the bias must have one number an output");
    const size_t padded = static_cast<size_t>(num_outputs + 15) / 16 * 16;
    float* to = static_cast<float*>(linear->bias.reserve(padded * 4));
    std::memset(to, 0, padded * 4);
    std::memcpy(to, bias->data(), static_cast<size_t>(num_outputs) * 4);
    linear->weights.bias = to;
    linear->num_bytes += padded * 4;
  }
  return linear;
}

}  // namespace octavo
