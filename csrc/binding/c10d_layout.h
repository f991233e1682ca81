// The layout of a compressed bucket, as the "pycomm" process group needs it. A part of _c10d.
#pragma once
#include <array>

#include "binding/c10d_support.h"
#include "collectives/communicator.h"

namespace pycomm::torch_binding {

/// The parameters of one bucket, as compressed collectives need them. Made once per bucket; keeps
/// codecs and residuals alive. Each residual is a pair: side s is read and side 1 - s is written,
/// so that a step can be taken back.
class Layout {
 public:
  using Pair = std::optional<std::array<at::Tensor, 2>>;

  /// Workers' residuals have so many rows of the values: one for each rank in a reduce_scatter.
  explicit Layout(size_t rows) : rows_(rows) {}

  void add(size_t offset, size_t numel, const std::string& codec, uint32_t tensor, Pair residual,
           Pair owner_residual) {
    check(residual, rows_ * numel);
    check(owner_residual, numel);
    parts_.push_back({offset, numel, make_codec(codec), tensor, residual, owner_residual});
  }
  size_t rows() const { return rows_; }
  size_t numel() const { return parts_.empty() ? 0 : parts_.back().offset + parts_.back().numel; }

  std::vector<Piece> pieces(int side) const {
    std::vector<Piece> pieces;
    pieces.reserve(parts_.size());
    for (const Part& part : parts_) {
      Piece piece;
      piece.offset = part.offset;
      piece.numel = part.numel;
      piece.codec = part.codec.get();
      piece.tensor = part.tensor;
      if (part.residual) {
        piece.residual = (*part.residual)[side].const_data_ptr<float>();
        piece.new_residual = (*part.residual)[1 - side].mutable_data_ptr<float>();
      }
      if (part.owner_residual) {
        piece.owner_residual = (*part.owner_residual)[side].const_data_ptr<float>();
        piece.new_owner_residual = (*part.owner_residual)[1 - side].mutable_data_ptr<float>();
      }
      pieces.push_back(piece);
    }
    return pieces;
  }

 private:
  struct Part {
    size_t offset, numel;
    std::unique_ptr<Codec> codec;
    uint32_t tensor;
    Pair residual, owner_residual;
  };
  static void check(const Pair& pair, size_t numel) {
    if (!pair) return;
    for (const at::Tensor& t : *pair)
      if (t.scalar_type() != at::kFloat || !t.is_contiguous() || !t.is_cpu() ||
          static_cast<size_t>(t.numel()) != numel)
        throw Error("a residual must be a contiguous float32 CPU tensor of " +
                    std::to_string(numel) + " values");
  }

  size_t rows_;
  std::vector<Part> parts_;
};

/// Of one call: which side of the residuals is read, and what CodedArgs has besides the values.
struct CodedStep {
  int side = 0;
  uint64_t seed = 0;
  uint32_t step = 0;
  bool average = true;
};

}  // namespace pycomm::torch_binding
