// Layout of a compressed bucket, as the "pycomm" process group needs it. A part of _c10d.
#pragma once
#include <algorithm>

#include "binding/torch/support.h"
#include "collectives/common/pieces.h"

namespace pycomm::torch_binding {

/// The parameters of one bucket, as compressed collectives need them. Made once per bucket; keeps
/// codecs and residuals alive.
class Layout final : public BucketPieces {
 public:
  /// The two sides of a residual of pycomm.feedback.
  using Pair = std::optional<std::array<at::Tensor, 2>>;

  /// `owner_residuals` is equal on all ranks: some rank may have a residual as an owner.
  Layout(size_t rows, bool owner_residuals)
      : BucketPieces(rows), owner_residuals_(owner_residuals) {}

  void add(size_t numel, const std::string& codec, uint32_t tensor, const feedback::Feedback& how,
           const Pair& worker, const Pair& owner, const Pair& momentum,
           const feedback::Spans& worker_spans, const feedback::Spans& owner_spans) {
    check_room(numel);
    const auto sides = [&](const Pair& pair, const feedback::Spans& spans, size_t rows) {
      TwoSides memory;
      if (!pair) return memory;
      memory.spans = spans;
      for (const size_t side : {0, 1}) {
        const auto place = [&](size_t value) {
          return feedback::stored_bytes(how.storage, std::min(value, numel));
        };
        const auto [begin, end] = spans[side];
        memory.at[side] = address((*pair)[side], rows * (place(end) - place(begin)));
      }
      return memory;
    };
    codecs_.push_back(make_codec(codec));
    BucketPieces::add(numel, codecs_.back().get(), tensor, how, sides(worker, worker_spans, rows()),
                      sides(owner, owner_spans, 1), sides(momentum, feedback::kAllValues, rows()));
  }
  bool owner_residuals() const { return owner_residuals_; }
  const Tensors& residuals() const { return residuals_; }
  /// True if the residuals are on this device, or there are none.
  bool is_on(c10::Device device) const {
    return residuals_.empty() || residuals_[0].device() == device;
  }

 private:
  uint8_t* address(const at::Tensor& t, size_t bytes) {
    if (!t.is_contiguous() || t.nbytes() != bytes)
      throw Error("a residual must be a contiguous tensor of " + std::to_string(bytes) + " bytes");
    if (!is_on(t.device())) throw Error("all residuals must be on one device");
    return static_cast<uint8_t*>(residuals_.emplace_back(t).mutable_data_ptr());
  }

  const bool owner_residuals_;
  std::vector<std::unique_ptr<Codec>> codecs_;
  Tensors residuals_;
};

/// The step of one call: the sides of each parameter's residual, and what CodedArgs has besides the
/// values.
struct CodedStep {
  std::vector<Sides> sides;
  uint64_t seed = 0;
  uint32_t step = 0;
  bool average = true;
};

}  // namespace pycomm::torch_binding
