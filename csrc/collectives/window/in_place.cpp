#include "collectives/window/in_place.h"

namespace pycomm::shared::in_place {
namespace {

/// Bytes that are folded before they are copied to all others: they are still in the first-level
/// cache then.
constexpr size_t kStep = size_t{16} << 10;

/// Returns the chunk of the buffer that each rank folds.
Slicing chunks_of(const Window& window, size_t bytes) {
  const size_t unit = kGrain * window.size();
  return {bytes, (bytes + unit - 1) / unit * kGrain};
}

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

/// Reduces `bytes` at `offset` of all ranks' data, at `own` of ours.
void reduce_range(Window& window, Reducer& reducer, const Places& in, size_t offset,
                  const void* own, size_t bytes, void* out) {
  if (!in.in_heaps()) return PeerReducer(window, reducer, in).run(offset, own, bytes, out);
  reducer.run(own, [&](int r) { return in[r] + offset; }, bytes, out);
}

// Every rank writes its own memory alone. The whole chunk is read at once: blocks of 128 KiB to 2
// MiB, read by the others while they are in cache, were slower from 16 MiB on (at 64 MiB by up to
// 2.3) and no faster by more than noise below, since ranks then wait for each other more often.
void all_reduce_by_reading(Window& window, Reducer& reducer, const Places& data, void* own,
                           size_t bytes) {
  const int me = window.rank();
  const Slicing chunks = chunks_of(window, bytes);
  uint8_t* mine = at(own, chunks.begin(me));
  reduce_range(window, reducer, data, chunks.begin(me), mine, chunks.size(me), mine);
  barrier(window);
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    data.read(rank, chunks.begin(rank), at(own, chunks.begin(rank)), chunks.size(rank));
  }
  barrier(window);
}

}  // namespace

void all_reduce(Window& window, Reducer& reducer, const Places& data, void* own, size_t bytes) {
  if (!data.in_heaps()) return all_reduce_by_reading(window, reducer, data, own, bytes);
  const int me = window.rank(), ranks = window.size();
  const Slicing chunks = chunks_of(window, bytes);
  const size_t begin = chunks.begin(me), end = chunks.begin(me + 1);
  for (size_t i = begin; i < end; i += kStep) {
    const size_t size = std::min(kStep, end - i);
    uint8_t* mine = data[me] + i;
    uint8_t* next = ranks > 1 ? data[window.peer(1)] + i : nullptr;
    reducer.run(mine, [&](int r) { return data[r] + i; }, size, mine, next);
    for (int k = 2; k < ranks; k++) std::memcpy(data[window.peer(k)] + i, mine, size);
  }
  barrier(window);
}

void reduce_scatter(Window& window, Reducer& reducer, const Places& in, Span<const uint8_t> own,
                    size_t offset, void* out) {
  reduce_range(window, reducer, in, offset, own.data, own.size, out);
  barrier(window);
}

void all_gather(Window& window, const Places& in, const void* own, const Parts& out) {
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    in.read(rank, 0, out[rank].data, out.bytes(rank));
  }
  copy_bytes(out[window.rank()].data, own, out.bytes(window.rank()));
  barrier(window);
}

void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes) {
  if (window.rank() != root) window.read(root, place, 0, data, bytes);
  barrier(window);
}

}  // namespace pycomm::shared::in_place
