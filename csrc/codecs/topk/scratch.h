// Arguments of topk's CUDA kernels, and the scratch memory that the kernels of a whole tensor
// share. Compiled by gcc, nvcc and NVRTC.
#pragma once
#include "codecs/base/params.h"
#include "codecs/topk/topk.h"

namespace pycomm::codecs::topk {

/// Arguments of every kernel.
struct TopkParams : StagedParams {
  uint64_t length;  ///< values of a record; the last may be shorter
  uint64_t k;       ///< of `length` values, those that travel
  uint64_t last_k;  ///< of a last, short record, those that travel
  uint32_t values;
  uint32_t indices;
};

constexpr uint32_t kBins = 2048;  ///< of a histogram; that of the last digit leaves 3/4 unused
/// Histograms: of the first digits that decide the bound, of those from the bound on, of those
/// below it, and of the other digits.
enum Histogram : uint32_t { kDeciding, kKept, kBelow, kSecond, kThird, kHistograms };
/// Without feedback one row of so many decides the bound.
constexpr uint32_t kSampleOf = 64;

/// Values of a warp's range in a whole tensor, and how many of those that reach the bound are kept,
/// with their places.
constexpr size_t kTile = 2048;
constexpr uint32_t kSlot = kTile / 16;

/// A digit of the wanted key, and its place among those that share it and the digits before it,
/// from 1 on.
struct Digit {
  uint32_t bin;
  uint32_t place;
};

/// The chosen values are all magnitudes above `bits`, and the first `ties` of those that equal it.
struct Threshold {
  uint32_t bits;
  uint32_t ties;
};

/// Results of the kernels so far, at the start of the scratch memory, which begins as zeros.
struct State {
  uint32_t is_void;
  Threshold cut;
  Digit digit[2];  ///< the first one; then the first two together
  uint32_t bound;  ///< first digits below it are not in the slots
};

constexpr int kRows = 4;                      ///< that a warp reads at once
constexpr size_t kStep = kRows * cuda::kRow;  ///< ranges of warps begin at multiples of it
/// Words that must be zero before an encode or a decode.
constexpr size_t kCleared = sizeof(State) / 4 + kHistograms * kBins;
constexpr size_t kClearTile = cuda::kRow;

/// Places of the parts of the scratch memory, in words of four bytes; all at multiples of four.
struct Layout {
  size_t bins;   ///< the histograms
  size_t tiles;  ///< of each warp: (greater, equal); then of each warp: values kept
  size_t slots;
  size_t p;
  size_t index;
  size_t words;

  PYCOMM_HD static size_t rounded(size_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

  PYCOMM_HD Layout(uint64_t numel, uint64_t k) {
    const size_t warps = (numel + kTile - 1) / kTile;
    bins = sizeof(State) / 4;
    tiles = kCleared;
    slots = tiles + (3 * warps + 3) / 4 * 4;
    p = slots + 2 * kSlot * warps;
    index = p + rounded(k);
    words = index + (index - p);
  }
};

}  // namespace pycomm::codecs::topk
