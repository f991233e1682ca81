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

/// Every rank writes its own memory alone, since it could not reclaim memory of the others.
void all_reduce_by_reading(Window& window, Reducer& reducer, const Places& data, size_t bytes) {
  const int me = window.rank();
  const Slicing chunks = chunks_of(window, bytes);
  const size_t begin = chunks.begin(me);
  uint8_t* own = data[me] + begin;
  reducer.run(own, [&](int r) { return data[r] + begin; }, chunks.size(me), own);
  barrier(window);
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    data.read(rank, chunks.begin(rank), data[me] + chunks.begin(rank), chunks.size(rank));
  }
  barrier(window);
}

}  // namespace

void all_reduce(Window& window, Reducer& reducer, const Places& data, size_t bytes) {
  if (window.one_mapping()) return all_reduce_by_reading(window, reducer, data, bytes);
  const int me = window.rank(), ranks = window.size();
  const Slicing chunks = chunks_of(window, bytes);
  const size_t begin = chunks.begin(me), end = chunks.begin(me + 1);
  for (size_t i = begin; i < end; i += kStep) {
    const size_t size = std::min(kStep, end - i);
    uint8_t* own = data[me] + i;
    uint8_t* next = ranks > 1 ? data[window.peer(1)] + i : nullptr;
    reducer.run(own, [&](int r) { return data[r] + i; }, size, own, next);
    for (int k = 2; k < ranks; k++) std::memcpy(data[window.peer(k)] + i, own, size);
  }
  barrier(window);
}

void reduce_scatter(Window& window, Reducer& reducer, const Places& in, size_t part_bytes,
                    void* out) {
  const size_t offset = part_bytes * window.rank();
  reducer.run(in[window.rank()] + offset, [&](int r) { return in[r] + offset; }, part_bytes, out);
  barrier(window);
}

void all_gather(Window& window, const Places& in, const void* own, const Parts& out) {
  for (int k = 1; k < window.size(); k++) {
    const int rank = window.peer(k);
    in.read(rank, 0, out[rank].data, out.bytes(rank));
  }
  copy(out[window.rank()].data, own, out.bytes(window.rank()));
  barrier(window);
}

void broadcast(Window& window, int root, uint64_t place, void* data, size_t bytes) {
  if (window.rank() != root) window.read(root, place, 0, data, bytes);
  barrier(window);
}

}  // namespace pycomm::shared::in_place
