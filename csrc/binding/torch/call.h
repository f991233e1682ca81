// Call: a c10d operation with its options, converted to the core's types.
#pragma once
#include <cstring>

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

  template <typename Opts>
  Call(const char* title, OpType type, const Opts& opts)
      : title(title),
        name(std::strchr(title, ':') + 1),
        type(type),
        timeout(std::max(unwrapped(opts.timeout), Milliseconds(0))),
        async(opts.asyncOp) {}
};

/// Returns the tag that the trace shows for an operation before it runs.
inline OpTag issued_tag(const Call& call, const Tensors& outputs, int ranks) {
  OpTag tag;
  tag.seq = 0;
  switch (call.type) {
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
      tag.op = Op::all_reduce;
      break;
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE:
      tag.op = Op::reduce_scatter;
      break;
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE:
    case OpType::ALLGATHER_COALESCED:
      tag.op = Op::all_gather;
      break;
    case OpType::ALLTOALL:
    case OpType::ALLTOALL_BASE:
      tag.op = Op::all_to_all;
      break;
    case OpType::BROADCAST:
      tag.op = Op::broadcast;
      break;
    case OpType::REDUCE:
      tag.op = Op::reduce;
      break;
    case OpType::GATHER:
      tag.op = Op::gather;
      break;
    case OpType::SCATTER:
      tag.op = Op::scatter;
      break;
    default:
      tag.op = Op::barrier;
      break;
  }
  if (!outputs.empty()) {
    tag.numel = static_cast<uint64_t>(outputs[0].numel());
    if (call.type == OpType::_ALLGATHER_BASE) tag.numel /= static_cast<uint64_t>(ranks);
    tag.dtype = find_dtype(outputs[0].scalar_type()).value_or(DType::uint8);
  }
  return tag;
}

struct Reduction {
  explicit Reduction(const c10d::ReduceOp& op) {
    switch (op) {
      case c10d::ReduceOp::SUM:
        this->op = ReduceOp::sum;
        break;
      case c10d::ReduceOp::AVG:
        this->op = ReduceOp::avg;
        break;
      case c10d::ReduceOp::PRODUCT:
        this->op = ReduceOp::prod;
        break;
      case c10d::ReduceOp::MIN:
        this->op = ReduceOp::min;
        break;
      case c10d::ReduceOp::MAX:
        this->op = ReduceOp::max;
        break;
      case c10d::ReduceOp::BAND:
        this->op = ReduceOp::band;
        break;
      case c10d::ReduceOp::BOR:
        this->op = ReduceOp::bor;
        break;
      case c10d::ReduceOp::BXOR:
        this->op = ReduceOp::bxor;
        break;
      case c10d::ReduceOp::PREMUL_SUM: {
        this->op = ReduceOp::premul_sum;
        // The name is that of torch 2.11 and 2.12; later versions have it beside a new one.
        const auto* premul = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
        factor = premul->tensor_factor.defined() ? premul->tensor_factor.item<double>()
                                                 : premul->double_factor;
        break;
      }
      default:
        throw Error("unknown reduce op " + std::to_string(op.op_));
    }
  }
  ReduceOp op;
  double factor = 1.0;
};

}  // namespace pycomm::torch_binding
