// Argument checks of the c10d operations, before a byte is sent: errors name the rank, the
// operation and the problem. A part of _c10d.
#pragma once
#include <ATen/DeviceAccelerator.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <map>

#include "binding/torch/call.h"
#include "collectives/communicator.h"
#include "core/reduce.h"

namespace pycomm::torch_binding {

struct Arguments {
  int rank, size;

  std::string here() const { return "rank " + std::to_string(rank) + ": "; }

  [[noreturn]] void fail(const Call& call, const std::string& what) const {
    raise(here() + call.name + ": " + what);
  }

  /// Checks a tensor that is read.
  void check(const Call& call, const at::Tensor& t) const {
    if (!t.defined()) fail(call, "got an undefined tensor");
    if (!t.is_cpu() && !at::accelerator::isAccelerator(t.device().type()))
      fail(call, "got a tensor on " + t.device().str() +
                     "; pycomm moves tensors of the CPU and of accelerators with streams");
    if (t.layout() != at::kStrided) fail(call, "got a sparse tensor; call .to_dense() first");
    if (t.is_nested()) fail(call, "got a nested tensor; pass the tensors that it consists of");
    // Quantized values mean nothing without a scale and a zero point, which may differ between
    // ranks.
    if (t.is_quantized())
      fail(call, "got a quantized tensor; pass its int_repr(), or call .dequantize() first");
    if (!has_its_memory(t))
      fail(call, "got a tensor of " + std::to_string(t.numel()) +
                     " values whose storage has been resized and is too small for them");
  }
  /// Checks a tensor that is written.
  void check_written(const Call& call, const at::Tensor& t) const {
    check(call, t);
    check_no_overlap(call, t);
  }
  void check_no_overlap(const Call& call, const at::Tensor& t) const {
    if (at::has_internal_overlap(t) == at::MemOverlap::Yes)
      fail(call,
           "cannot write to a tensor several of whose values share one place in memory, as "
           "after expand(); call .clone() first");
  }
  /// Checks several tensors that are written, which must not overlap.
  void check_written(const Call& call, const Tensors& tensors) const {
    for (const at::Tensor& t : tensors) check_written(call, t);
    if (tensors.size() > 1 && any_overlap(tensors))
      fail(call,
           "cannot write to a list of tensors that share memory with each other, as one tensor "
           "that is in the list twice does: two results would have one place; pass tensors of "
           "their own, or call .clone()");
  }
  /// Does the same where one tensor may be in the list several times, if it gets the same result
  /// each time: what it gets is made from `from`, which has as many tensors.
  void check_written(const Call& call, const Tensors& tensors, const Tensors& from) const {
    std::map<const void*, size_t> first;
    Tensors distinct;
    for (size_t i = 0; i < tensors.size(); i++) {
      check_written(call, tensors[i]);
      const auto [known, is_new] = first.emplace(memory_of(tensors[i]), i);
      const size_t j = known->second;
      if (is_new || !is_same(tensors[i], tensors[j]) || !is_same(from[i], from[j]))
        distinct.push_back(tensors[i]);
    }
    check_written(call, distinct);
  }

  const at::Tensor& only(const Call& call, const Tensors& tensors) const {
    if (tensors.size() != 1) fail(call, "takes one tensor, got " + std::to_string(tensors.size()));
    check(call, tensors[0]);
    return tensors[0];
  }
  const at::Tensor& only_written(const Call& call, const Tensors& tensors) const {
    check_no_overlap(call, only(call, tensors));
    return tensors[0];
  }

  /// Checks the root before its 64 bits become the 32 of the core.
  template <typename Opts>
  int root(const Call& call, const Opts& opts) const {
    check_peer(call, "the root", opts.rootRank);
    return static_cast<int>(opts.rootRank);
  }
  void check_root_tensor(const Call& call, int64_t tensor) const {
    if (tensor != 0)
      fail(call, "takes one tensor, so the root tensor is 0, not " + std::to_string(tensor));
  }
  void check_peer(const Call& call, const char* what, int64_t peer) const {
    if (peer < 0 || peer >= size)
      fail(call, std::string(what) + " is " + std::to_string(peer) + ", but the group has ranks 0" +
                     (size > 1 ? " to " + std::to_string(size - 1) : ""));
  }

  void same_dtype(const Call& call, const at::Tensor& t, const at::Tensor& like) const {
    check(call, t);
    if (t.scalar_type() != like.scalar_type())
      fail(call, std::string("all tensors must have one dtype, got ") +
                     c10::toString(t.scalar_type()) + " and " + c10::toString(like.scalar_type()));
  }

  /// Returns the inner list, checked: one tensor per rank, of the dtype of `like`. Sizes may
  /// differ.
  Tensors one_per_rank(const Call& call, const std::vector<Tensors>& lists,
                       const at::Tensor& like) const {
    if (lists.size() != 1)
      fail(call, "takes one list of tensors, got " + std::to_string(lists.size()));
    const Tensors& list = lists[0];
    if (static_cast<int>(list.size()) != size)
      fail(call, "needs a list of " + std::to_string(size) + " tensors, one per rank, got " +
                     std::to_string(list.size()));
    for (const at::Tensor& t : list) same_dtype(call, t, like);
    return list;
  }

  /// Returns a collective without its buffers that reduces tensors like t.
  Collective reducing(const Call& call, const at::Tensor& t, const c10d::ReduceOp& redop,
                      int root = -1) const {
    const auto dtype = find_dtype(t.scalar_type());
    if (!dtype) fail(call, std::string("cannot reduce dtype ") + c10::toString(t.scalar_type()));
    if (redop == c10d::ReduceOp::PREMUL_SUM && !redop.supplement_)
      fail(call, "PREMUL_SUM needs a factor; make it by _make_nccl_premul_sum(factor)");
    try {
      const Reduction reduction(redop);
      check_reducible(*dtype, reduction.op);
      return {call.op, *dtype, {}, {}, reduction.op, reduction.factor, root};
    } catch (const Error& e) {
      fail(call, e.what());
    }
  }

  /// Returns how many elements each rank's rows have.
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
    // The remainder is counted down, since a sum might wrap.
    int64_t left = length;
    bool fits = static_cast<int>(counts.size()) == size;
    for (const int64_t count : counts) {
      fits = fits && count >= 0 && count <= left;
      left -= fits ? count : 0;
    }
    if (!fits || left != 0)
      fail(call,
           std::string("the split sizes of the ") + role + " must be " + std::to_string(size) +
               " numbers of at least 0 whose sum is its dimension 0, " + std::to_string(length));
    std::vector<size_t> numels;
    for (const int64_t count : counts) numels.push_back(static_cast<size_t>(count) * row);
    return numels;
  }
  static bool equal(const Tensors& list) {
    return std::all_of(list.begin(), list.end(),
                       [&](const at::Tensor& t) { return t.numel() == list[0].numel(); });
  }
  static bool equal(const std::vector<size_t>& numels) {
    return std::all_of(numels.begin(), numels.end(), [&](size_t n) { return n == numels[0]; });
  }

  /// Checks that each of `whole` has as many values as its `part` has on all ranks together.
  void pair_up(const Call& call, const Tensors& whole, const Tensors& part) const {
    if (whole.size() != part.size() || whole.empty())
      fail(call, "needs as many outputs as inputs, got " + std::to_string(whole.size()) + " and " +
                     std::to_string(part.size()));
    for (size_t i = 0; i < whole.size(); i++) {
      check(call, whole[i]);
      same_dtype(call, part[i], whole[i]);
      if (whole[i].numel() % size != 0 || whole[i].numel() / size != part[i].numel())
        fail(call, "the larger tensor must have " + std::to_string(size) + " times " +
                       std::to_string(part[i].numel()) + " values, one part per rank, but has " +
                       std::to_string(whole[i].numel()));
    }
  }

 private:
  static const void* memory_of(const at::Tensor& t) {
    return t.numel() == 0 ? nullptr : t.const_data_ptr();
  }
  /// True if both are one tensor, perhaps under two names.
  static bool is_same(const at::Tensor& a, const at::Tensor& b) {
    return memory_of(a) == memory_of(b) && a.scalar_type() == b.scalar_type() &&
           a.sizes() == b.sizes() && a.strides() == b.strides();
  }
  /// True if the first value of a tensor lies in another one. Tensors with gaps, such as columns of
  /// a matrix, may interleave; of those only equal beginnings count.
  static bool any_overlap(const Tensors& tensors) {
    struct Place {
      const char* begin;
      const char* end;  // of the first value at least; of all values if there are no gaps
    };
    std::vector<Place> places;
    for (const at::Tensor& t : tensors) {
      if (t.numel() == 0) continue;
      const auto* begin = static_cast<const char*>(t.const_data_ptr());
      places.push_back({begin, t.is_non_overlapping_and_dense() ? begin + t.nbytes() : begin + 1});
    }
    std::sort(places.begin(), places.end(),
              [](const Place& a, const Place& b) { return a.begin < b.begin; });
    const char* taken = nullptr;
    for (const Place& place : places) {
      if (taken && place.begin < taken) return true;
      taken = std::max(taken, place.end);
    }
    return false;
  }
  /// True if the storage still has the tensor's memory. A storage can be made smaller under its
  /// tensors, as FSDP does with those that it frees.
  static bool has_its_memory(const at::Tensor& t) {
    if (t.numel() == 0) return true;
    if (!t.has_storage()) return false;
    int64_t last = t.storage_offset();
    const auto sizes = t.sizes(), strides = t.strides();
    for (size_t i = 0; i < sizes.size(); i++) last += (sizes[i] - 1) * strides[i];
    return static_cast<size_t>(last) < t.storage().nbytes() / t.element_size();
  }
};

}  // namespace pycomm::torch_binding
