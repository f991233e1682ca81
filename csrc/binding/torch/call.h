// Call: a c10d operation with its options, converted to the core's types.
#pragma once
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "binding/torch/support.h"
#include "core/op.h"

namespace pycomm::torch_binding {

/// Handles timedelta.max: pybind11 counts its microseconds in 64 bits, where it wraps to less than
/// any intended time.
inline Milliseconds unwrapped(Milliseconds timeout) {
  return timeout < -kForever ? kForever : timeout;
}

/// One call of an operation.
struct Call {
  const char* title;  ///< in profiles: "pycomm:" and torch's name
  const char* name;   ///< in errors: torch's name
  OpType type;
  Milliseconds timeout;  ///< 0: the group's timeout
  bool async;
  Op op;  ///< in the trace, before it runs

  template <typename Opts>
  Call(const char* title, OpType type, const Opts& opts, Op op = Op::barrier)
      : title(title),
        name(std::strchr(title, ':') + 1),
        type(type),
        timeout(std::max(unwrapped(opts.timeout), Milliseconds(0))),
        async(opts.asyncOp),
        op(op) {}
};

/// Returns the tag that the trace shows for an operation before it runs.
inline OpTag issued_tag(const Call& call, const Tensors& outputs, int ranks) {
  OpTag tag;
  tag.op = call.op;
  if (!outputs.empty()) {
    tag.numel = static_cast<uint64_t>(outputs[0].numel());
    const bool is_whole = call.type == OpType::_ALLGATHER_BASE || call.type == OpType::COALESCED;
    if (is_whole) tag.numel /= static_cast<uint64_t>(ranks);
    tag.dtype = find_dtype(outputs[0].scalar_type()).value_or(DType::uint8);
  }
  return tag;
}

struct Reduction {
  explicit Reduction(const c10d::ReduceOp& given) {
    static constexpr std::pair<c10d::ReduceOp::RedOpType, ReduceOp> kOps[] = {
        {c10d::ReduceOp::SUM, ReduceOp::sum},
        {c10d::ReduceOp::AVG, ReduceOp::avg},
        {c10d::ReduceOp::PRODUCT, ReduceOp::prod},
        {c10d::ReduceOp::MIN, ReduceOp::min},
        {c10d::ReduceOp::MAX, ReduceOp::max},
        {c10d::ReduceOp::BAND, ReduceOp::band},
        {c10d::ReduceOp::BOR, ReduceOp::bor},
        {c10d::ReduceOp::BXOR, ReduceOp::bxor},
        {c10d::ReduceOp::PREMUL_SUM, ReduceOp::premul_sum},
    };
    const auto* known = std::find_if(std::begin(kOps), std::end(kOps),
                                     [&](const auto& each) { return each.first == given.op_; });
    if (known == std::end(kOps)) throw Error("unknown reduce op " + std::to_string(given.op_));
    op = known->second;
    if (op != ReduceOp::premul_sum) return;
    // The name is that of torch 2.11 and 2.12; later versions have it beside a new one.
    const auto* premul = static_cast<c10d::NCCLPreMulSumSupplement*>(given.supplement_.get());
    factor = premul->tensor_factor.defined() ? premul->tensor_factor.item<double>()
                                             : premul->double_factor;
  }
  ReduceOp op;
  double factor = 1.0;
};

}  // namespace pycomm::torch_binding
