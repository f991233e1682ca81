// Checks of what callers hand in, before a byte is sent: errors name the rank, the operation and
// what is wrong. A part of _c10d.
#pragma once
#include <ATen/DeviceAccelerator.h>

#include <numeric>

#include "binding/c10d_call.h"
#include "collectives/communicator.h"
#include "core/reduce.h"

namespace pycomm::torch_binding {

struct Arguments {
  int rank, size;

  std::string here() const { return "rank " + std::to_string(rank) + ": "; }

  [[noreturn]] void fail(const Call& call, const std::string& what) const {
    raise(here() + call.name + ": " + what);
  }

  void check(const Call& call, const at::Tensor& t) const {
    if (!t.is_cpu() && !at::accelerator::isAccelerator(t.device().type()))
      fail(call, "got a tensor on " + t.device().str() +
                     "; pycomm moves tensors of the CPU and of accelerators with streams");
    if (t.layout() != at::kStrided) fail(call, "got a sparse tensor; call .to_dense() first");
  }

  const at::Tensor& only(const Call& call, const Tensors& tensors) const {
    if (tensors.size() != 1) fail(call, "takes one tensor, got " + std::to_string(tensors.size()));
    check(call, tensors[0]);
    return tensors[0];
  }

  void same_dtype(const Call& call, const at::Tensor& t, const at::Tensor& like) const {
    check(call, t);
    if (t.scalar_type() != like.scalar_type())
      fail(call, std::string("all tensors must have one dtype, got ") +
                     c10::toString(t.scalar_type()) + " and " + c10::toString(like.scalar_type()));
  }

  /// The inner list, checked: one tensor per rank, of the dtype of `like`. Sizes may differ, but
  /// where the list has a `role`, this rank's tensor in it must have the size of `like`.
  Tensors one_per_rank(const Call& call, const std::vector<Tensors>& lists, const at::Tensor& like,
                       const char* role = nullptr) const {
    if (lists.size() != 1) fail(call, "takes one list of tensors");
    const Tensors& list = lists[0];
    if (static_cast<int>(list.size()) != size)
      fail(call, "needs a list of " + std::to_string(size) + " tensors, one per rank, got " +
                     std::to_string(list.size()));
    for (const at::Tensor& t : list) same_dtype(call, t, like);
    if (role && list[rank].numel() != like.numel())
      fail(call, "part " + std::to_string(rank) + " of the " + role + " list has " +
                     std::to_string(list[rank].numel()) + " values, the other tensor " +
                     std::to_string(like.numel()));
    return list;
  }

  std::pair<DType, Reduction> reducible(const Call& call, const at::Tensor& t,
                                        const c10d::ReduceOp& op) const {
    const auto dtype = find_dtype(t.scalar_type());
    if (!dtype) fail(call, std::string("cannot reduce dtype ") + c10::toString(t.scalar_type()));
    try {
      const Reduction reduction(op);
      check_reducible(*dtype, reduction.op);
      return {*dtype, reduction};
    } catch (const Error& e) {
      fail(call, e.what());
    }
  }

  /// How many elements each rank's rows have.
  std::vector<size_t> rows(const Call& call, const at::Tensor& t,
                           const std::vector<int64_t>& splits, const char* role) const {
    const int64_t length = t.dim() == 0 ? 1 : t.size(0);
    const size_t row = length == 0 ? 0 : Elements(t).count(t) / length;
    std::vector<int64_t> counts = splits;
    if (counts.empty()) {
      if (length % size)
        fail(call, std::string("dimension 0 of the ") + role + ", " + std::to_string(length) +
                       ", is not divisible by " + std::to_string(size) +
                       " ranks; pass split sizes");
      counts.assign(size, length / size);
    }
    if (static_cast<int>(counts.size()) != size ||
        std::accumulate(counts.begin(), counts.end(), int64_t{0}) != length)
      fail(call, std::string("the split sizes of the ") + role + " must be " +
                     std::to_string(size) + " numbers whose sum is its dimension 0, " +
                     std::to_string(length));
    std::vector<size_t> numels;
    for (const int64_t count : counts) numels.push_back(count * row);
    return numels;
  }

  /// Each of `whole` must have as many values as its `part` has on all ranks together.
  void pair_up(const Call& call, const Tensors& whole, const Tensors& part) const {
    if (whole.size() != part.size() || whole.empty())
      fail(call, "needs as many outputs as inputs, got " + std::to_string(whole.size()) + " and " +
                     std::to_string(part.size()));
    for (size_t i = 0; i < whole.size(); i++) {
      check(call, whole[i]);
      same_dtype(call, part[i], whole[i]);
      if (whole[i].numel() != part[i].numel() * size)
        fail(call, "the larger tensor must have " + std::to_string(size) + " times " +
                       std::to_string(part[i].numel()) + " values, one part per rank, but has " +
                       std::to_string(whole[i].numel()));
    }
  }
};

}  // namespace pycomm::torch_binding
