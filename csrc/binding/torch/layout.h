// Layout of a compressed bucket, as the "pycomm" process group needs it. A part of _c10d.
#pragma once
#include <algorithm>
#include <array>

#include "binding/torch/support.h"
#include "collectives/communicator.h"

namespace pycomm::torch_binding {

/// The side of a pair that a step reads, and the one that it writes, so that the step can be taken
/// back. They are the same where a step works in place.
using Sides = std::pair<size_t, size_t>;

/// The memory of one parameter's feedback, as pycomm.feedback.Residual has it.
struct Memories {
  using Pair = std::optional<std::array<at::Tensor, 2>>;
  feedback::Kind kind = feedback::Kind::residual;
  feedback::Storage storage = feedback::Storage::float32;
  float decay = 0.0f;
  Pair worker, owner, momentum;
  feedback::Spans worker_spans = feedback::kAllValues, owner_spans = feedback::kAllValues;
};

/// The parameters of one bucket, as compressed collectives need them. Made once per bucket; keeps
/// codecs and residuals alive.
class Layout {
 public:
  /// `rows` is the number of rows of the workers' residuals: one for each rank in a reduce_scatter.
  /// `owner_residuals` is equal on all ranks: some rank may have a residual as an owner.
  Layout(size_t rows, bool owner_residuals) : rows_(rows), owner_residuals_(owner_residuals) {}

  void add(size_t offset, size_t numel, const std::string& codec, uint32_t tensor,
           const Memories& memories) {
    // Residuals have at most the bytes of float32, in this many rows.
    const size_t most = kLargestBuffer / sizeof(float) / std::max<size_t>(rows_, 1);
    if (numel > most || offset > most - numel)
      throw Error("no memory holds " + std::to_string(numel) + " values at " +
                  std::to_string(offset));
    if (offset != this->numel())
      throw Error("a part begins at " + std::to_string(offset) +
                  ", but the one before it ends at " + std::to_string(this->numel()) +
                  "; parts must follow each other without gaps");
    const auto bytes = [&](std::pair<size_t, size_t> span, size_t rows) {
      const auto place = [&](size_t value) {
        return feedback::stored_bytes(memories.storage, std::min(value, numel));
      };
      return rows * (place(span.second) - place(span.first));
    };
    for (const size_t side : {0, 1}) {
      check(memories.worker, side, bytes(memories.worker_spans[side], rows_));
      check(memories.owner, side, bytes(memories.owner_spans[side], 1));
      check(memories.momentum, side, bytes(feedback::kAllValues[side], rows_));
    }
    parts_.push_back({offset, numel, make_codec(codec), tensor, memories});
  }
  size_t rows() const { return rows_; }
  bool owner_residuals() const { return owner_residuals_; }
  size_t size() const { return parts_.size(); }
  size_t numel() const { return parts_.empty() ? 0 : parts_.back().offset + parts_.back().numel; }

  /// True if the residuals are on this device, or there are none.
  bool is_on(c10::Device device) const { return !device_ || *device_ == device; }

  /// Adds all residuals to a list.
  void list_residuals(std::vector<at::Tensor>& tensors) const {
    for (const Part& part : parts_) {
      const Memories& m = part.memories;
      for (const Memories::Pair* pair : {&m.worker, &m.owner, &m.momentum})
        if (*pair) tensors.insert(tensors.end(), (*pair)->begin(), (*pair)->end());
    }
  }

  /// `sides` has one entry for each parameter.
  std::vector<Piece> pieces(const std::vector<Sides>& sides) const {
    std::vector<Piece> pieces;
    pieces.reserve(parts_.size());
    for (size_t i = 0; i < parts_.size(); i++) {
      const Part& part = parts_[i];
      const Memories& m = part.memories;
      Piece piece;
      piece.offset = part.offset;
      piece.numel = part.numel;
      piece.codec = part.codec.get();
      piece.tensor = part.tensor;
      piece.worker = {m.kind, m.storage, m.decay, memory(m.worker, m.worker_spans, sides[i]),
                      memory(m.momentum, feedback::kAllValues, sides[i])};
      piece.owner.storage = m.storage;
      piece.owner.error = memory(m.owner, m.owner_spans, sides[i]);
      pieces.push_back(piece);
    }
    return pieces;
  }

 private:
  struct Part {
    size_t offset, numel;
    std::unique_ptr<Codec> codec;
    uint32_t tensor;
    Memories memories;
  };
  static feedback::Memory memory(const Memories::Pair& pair, const feedback::Spans& spans,
                                 const Sides& sides) {
    if (!pair) return {};
    const auto [old, fresh] = sides;
    const auto [begin, end] = feedback::shared_span(spans, old, fresh);
    return {static_cast<const uint8_t*>((*pair)[old].const_data_ptr()),
            static_cast<uint8_t*>((*pair)[fresh].mutable_data_ptr()), begin, end};
  }
  void check(const Memories::Pair& pair, size_t side, size_t bytes) {
    if (!pair) return;
    const at::Tensor& t = (*pair)[side];
    if (!t.is_contiguous() || t.nbytes() != bytes)
      throw Error("a residual must be a contiguous tensor of " + std::to_string(bytes) + " bytes");
    if (!device_) device_ = t.device();
    if (*device_ != t.device()) throw Error("all residuals must be on one device");
  }

  size_t rows_;
  bool owner_residuals_;
  std::optional<c10::Device> device_;  ///< of the residuals
  std::vector<Part> parts_;
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
