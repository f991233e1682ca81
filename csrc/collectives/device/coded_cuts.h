// Cuts of an operation with codecs among GPUs into segments, and its working memory.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "collectives/coded/coded.h"
#include "collectives/device/group_impl.h"

namespace pycomm {

class DeviceGroup::Impl::Cuts {
 public:
  Cuts(const Impl& group, Op op, const CodedArgs& args)
      : group_(group),
        op_(op),
        args_(args),
        place_bytes_(group.place_bytes()),
        owned_(layout(op == Op::all_reduce ? pick(args, false) : std::vector<coded::PieceRun>(),
                      group.size())),
        shown_(layout(op == Op::all_reduce ? pick(args, true) : coded::values_of(args.pieces), 1)) {
    measure(owned_, group.size());
    measure(shown_, 1);
  }

  /// Layout of the values with owners, a chunk for each rank; and of what each rank shares with
  /// all.
  const coded::BucketLayout& owned() const { return owned_; }
  const coded::BucketLayout& shown() const { return shown_; }
  /// Bytes of the place of a payload in the memory that a rank shares.
  size_t place_bytes() const { return place_bytes_; }
  /// Bytes of the scratch memory of a GPU's stream: float32 of values of 16 bits, then what codecs
  /// and their feedback need.
  size_t float32_bytes() const { return aligned(float32_numel_ * sizeof(float)); }
  size_t scratch_bytes() const { return float32_bytes() + codec_bytes_; }

 private:
  [[noreturn]] void too_large(size_t bytes) const {
    group_.fail(op_, "needs " + std::to_string(bytes) + " bytes for a payload, but coded_bytes = " +
                         std::to_string(group_.coded_bytes()) + " gives each of " +
                         std::to_string(group_.size() + 2) + " payloads " +
                         std::to_string(place_bytes_) + "; make the group with more coded_bytes");
  }

  /// Returns a layout in segments that each fit in a place.
  coded::BucketLayout layout(const std::vector<coded::PieceRun>& values, int owners) const {
    for (size_t numel = std::max<size_t>(1, coded::numel_of(values));; numel = (numel + 1) / 2) {
      coded::BucketLayout layout(args_.pieces, values, owners, numel);
      size_t most = 0;
      for (int r = 0; r < owners; r++) {
        for (size_t s = 0; s < layout.count(r); s++) {
          most = std::max(most, layout.at(r, s).bytes);
        }
      }
      if (most <= place_bytes_) return layout;
      if (numel == 1) too_large(most);
    }
  }

  void measure(const coded::BucketLayout& layout, int owners) {
    for (int r = 0; r < owners; r++) {
      for (size_t s = 0; s < layout.count(r); s++) {
        size_t numel = 0;
        for (const coded::PieceRun& run : layout.runs(layout.at(r, s))) {
          numel += run.numel;
          const Piece& piece = args_.pieces[run.piece];
          const size_t residual =
              std::max(feedback::scratch_bytes(*piece.codec, piece.worker, run.numel),
                       feedback::scratch_bytes(*piece.codec, piece.owner, run.numel));
          codec_bytes_ = std::max(codec_bytes_, residual + piece.codec->scratch_bytes(run.numel));
        }
        if (args_.data.dtype != DType::float32) float32_numel_ = std::max(float32_numel_, numel);
      }
    }
  }

  static constexpr size_t kAlign = 256;
  static size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  static std::vector<coded::PieceRun> pick(const CodedArgs& args, bool gathered) {
    std::vector<coded::PieceRun> result;
    for (const coded::PieceRun& run : coded::values_of(args.pieces)) {
      const bool is = args.pieces[run.piece].codec->combine() == Combine::gather;
      if (is == gathered) result.push_back(run);
    }
    return result;
  }

  const Impl& group_;
  const Op op_;
  const CodedArgs& args_;
  const size_t place_bytes_;
  size_t float32_numel_ = 0, codec_bytes_ = 0;
  const coded::BucketLayout owned_, shown_;
};

}  // namespace pycomm
