#include "collectives/window/cma_read.h"

namespace pycomm::shared::cma_read {
namespace {

/// Reads the same range of all other ranks piece by piece and folds it. Pieces go through our
/// staging memory, which no rank reads since the first stage is complete, and stay in cache.
class PeerReducer {
 public:
  PeerReducer(Window& window, Reducer& reducer, const Places& in)
      : window_(window), reducer_(reducer), in_(in) {
    const auto others = static_cast<size_t>(std::max(1, window.size() - 1));
    piece_ = std::min(kSlotBytes, kStagingBytes / others / kGrain * kGrain);
  }

  /// The range is `bytes` at `offset` of all peers' data, at `own` of ours.
  void run(size_t offset, const void* own, size_t bytes, void* out) {
    const int me = window_.rank();
    const Slicing cut{bytes, piece_};
    for (size_t i = 0; i < cut.count(); i++) {
      for (int k = 1; k < window_.size(); k++) {
        in_.read(window_.peer(k), offset + cut.begin(i), scratch(k), cut.size(i));
      }
      reducer_.run(
          at(own, cut.begin(i)),
          [&](int r) { return scratch(r > me ? r - me : r - me + window_.size()); }, cut.size(i),
          at(out, cut.begin(i)));
    }
  }

 private:
  /// Staging memory for the k-th rank after us.
  uint8_t* scratch(int k) const { return window_.staging(window_.rank(), 0) + (k - 1) * piece_; }

  Window& window_;
  Reducer& reducer_;
  const Places& in_;
  size_t piece_;
};

}  // namespace

// The whole chunk is read at once: blocks of 128 KiB to 2 MiB, read by the others while they are in
// cache, were slower from 16 MiB on (at 64 MiB by up to 2.3) and no faster by more than noise
// below, since ranks then wait for each other more often.
void all_reduce(Window& window, Reducer& reducer, const Places& data, void* own, size_t bytes) {
  const int me = window.rank(), ranks = window.size();
  const size_t unit = kGrain * ranks;
  const Slicing chunks{bytes, (bytes + unit - 1) / unit * kGrain};
  uint8_t* mine = at(own, chunks.begin(me));
  PeerReducer(window, reducer, data).run(chunks.begin(me), mine, chunks.size(me), mine);
  barrier(window);
  for (int k = 1; k < ranks; k++) {
    const int rank = window.peer(k);
    data.read(rank, chunks.begin(rank), at(own, chunks.begin(rank)), chunks.size(rank));
  }
  barrier(window);
}

void reduce_scatter(Window& window, Reducer& reducer, const Places& in, const void* own,
                    size_t part_bytes, void* out) {
  PeerReducer(window, reducer, in).run(part_bytes * window.rank(), own, part_bytes, out);
  barrier(window);
}

}  // namespace pycomm::shared::cma_read
