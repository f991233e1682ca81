// How an operation with codecs among GPUs is cut into segments, and the memory that it works in.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "collectives/coded.h"
#include "collectives/coded_agree.h"
#include "collectives/device_group_impl.h"

namespace pycomm {

class DeviceGroup::Impl::Cuts {
 public:
  Cuts(const Impl& group, Op op, const CodedArgs& args)
      : group_(group),
        op_(op),
        args_(args),
        place_bytes_(group.coded_bytes() / (group.size() + 3) / kAlign * kAlign),
        owned_(layout(op == Op::all_reduce ? pick(args, false) : std::vector<coded::Run>(),
                      group.size())),
        shown_(layout(op == Op::all_reduce ? pick(args, true) : coded::values_of(args.pieces), 1)) {
    look(owned_, group.size());
    look(shown_, 1);
  }

  /// What all ranks share in: a chunk for each of them, and what each shows to all.
  const coded::Layout& owned() const { return owned_; }
  const coded::Layout& shown() const { return shown_; }
  /// Of a payload in what a rank shows.
  size_t place_bytes() const { return place_bytes_; }
  /// Of the scratch memory of a GPU's stream: float32 of values of 16 bits, then what codecs need.
  size_t landing_bytes() const { return aligned(landing_numel_ * sizeof(float)); }
  size_t scratch_bytes() const { return landing_bytes() + codec_bytes_; }

  [[noreturn]] void too_large(size_t bytes) const {
    group_.fail(op_, "needs places of " + std::to_string(bytes) +
                         " bytes, but of coded_bytes = " + std::to_string(group_.coded_bytes()) +
                         " one of " + std::to_string(group_.size() + 3) + " has " +
                         std::to_string(place_bytes_));
  }

 private:
  /// In segments of which each fits in a place.
  coded::Layout layout(const std::vector<coded::Run>& values, int owners) const {
    for (size_t numel = std::max<size_t>(1, coded::numel_of(values));; numel = (numel + 1) / 2) {
      coded::Layout layout(args_.pieces, values, owners, numel);
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

  void look(const coded::Layout& layout, int owners) {
    for (int r = 0; r < owners; r++) {
      for (size_t s = 0; s < layout.count(r); s++) {
        size_t numel = 0;
        for (const coded::Run& run : layout.runs(layout.at(r, s))) {
          numel += run.numel;
          const Codec& codec = *args_.pieces[run.piece].codec;
          codec_bytes_ = std::max(codec_bytes_, codec.scratch_bytes(run.numel));
          if (codec.agrees()) numel = std::max(numel, coded::Agreed::kSlice);
        }
        if (args_.data.dtype != DType::float32) landing_numel_ = std::max(landing_numel_, numel);
      }
    }
  }

  static constexpr size_t kAlign = 256;
  static size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  static std::vector<coded::Run> pick(const CodedArgs& args, bool gathered) {
    std::vector<coded::Run> result;
    for (const coded::Run& run : coded::values_of(args.pieces)) {
      const bool is = args.pieces[run.piece].codec->combine() == Combine::gather;
      if (is == gathered) result.push_back(run);
    }
    return result;
  }

  const Impl& group_;
  const Op op_;
  const CodedArgs& args_;
  const size_t place_bytes_;
  size_t landing_numel_ = 0, codec_bytes_ = 0;
  const coded::Layout owned_, shown_;
};

}  // namespace pycomm
