// Direct collectives that reduce. Those that only move bytes: direct_move.cpp.
#include "collectives/direct.h"

#include <memory>

#include "collectives/stream.h"

namespace pycomm::direct {
namespace {

using schedule::Range;

/// A buffer cut into one chunk per rank, of about the same size.
template <typename T>
std::vector<BasicPart<T>> even_chunks(T* data, size_t numel, int ranks, size_t element) {
  using Byte = typename BasicParts<T>::Byte;
  std::vector<BasicPart<T>> chunks(ranks);
  for (int r = 0; r < ranks; r++) {
    const Range range = schedule::chunk(numel, ranks, r, schedule::line(element));
    chunks[r] = {static_cast<Byte*>(data) + range.begin * element, range.size()};
  }
  return chunks;
}

/// visit(its bytes) for each segment of a chunk.
template <typename Byte, typename Visit>
void for_each_segment(const Span<Byte>& chunk, size_t segment_bytes, const Visit& visit) {
  for (size_t begin = 0; begin < chunk.size; begin += segment_bytes) {
    visit(chunk.sub(begin, std::min(segment_bytes, chunk.size - begin)));
  }
}

// Sends every rank its part of `in` and folds ours into `out`. Calls reduced(segment of `out`) as
// soon as it is final. A few segments of every peer are received ahead while one is folded.
template <typename Reduced>
void scatter_reduce(Exchange& ex, const ConstParts& in, void* out, const Fold& fold,
                    const Reduced& reduced) {
  const int n = ex.size();
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(ex, element);
  for (int i = 1; i < n; i++) {
    for_each_segment(in[ex.after(i)], segment * element,
                     [&](const Span<const uint8_t>& s) { ex.send(ex.after(i), s.data, s.size); });
  }

  const Span<const uint8_t> source = in[ex.rank()];
  const Range own{0, in.numel(ex.rank())};
  const size_t count = schedule::num_segments(own, segment),
               slots = std::min(kReceivesAhead, count);
  const size_t slot_bytes = std::min(segment, own.size()) * element;
  uint8_t* scratch = ex.scratch(slots * n * slot_bytes);
  std::vector<uint64_t> tickets(slots * n);
  const auto place = [&](size_t s, int rank) { return (s % slots) * n + rank; };
  const auto receive = [&](size_t s) {
    const size_t bytes = schedule::segment(own, segment, s).size() * element;
    for (int i = 1; i < n; i++) {
      const size_t at = place(s, ex.after(i));
      tickets[at] = ex.recv(ex.after(i), scratch + at * slot_bytes, bytes);
    }
  };

  for (size_t s = 0; s < slots; s++) receive(s);
  std::vector<const void*> inputs(n);
  for (size_t s = 0; s < count; s++) {
    const Range range = schedule::segment(own, segment, s);
    for (int i = 1; i < n; i++) ex.wait(ex.after(i), tickets[place(s, ex.after(i))]);
    for (int r = 0; r < n; r++) inputs[r] = scratch + place(s, r) * slot_bytes;
    inputs[ex.rank()] = source.data + range.begin * element;
    uint8_t* result = static_cast<uint8_t*>(out) + range.begin * element;
    fold(inputs.data(), n, result, range.size());
    reduced(Span<uint8_t>(result, range.size() * element));
    if (s + slots < count) receive(s + slots);
  }
}

// Everybody's `in` meets at the ranks for which `here` is true, which fold it into `out`.
void one_shot(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold, int root) {
  const int n = ex.size();
  const bool here = root < 0 || root == ex.rank();
  const size_t bytes = numel * size_of(fold.dtype);
  uint8_t* scratch = here ? ex.scratch(n * bytes) : nullptr;
  std::vector<const void*> inputs(n, in);
  for (int i = 1; i < n; i++) {
    const int peer = ex.after(i);
    if (root < 0 || peer == root) ex.send(peer, in, bytes);
    if (!here) continue;
    inputs[peer] = scratch + peer * bytes;
    ex.recv(peer, scratch + peer * bytes, bytes);
  }
  ex.wait_all();  // `out` may be `in`, which is sent until here
  if (here) fold(inputs.data(), n, out, numel);
}

}  // namespace

void one_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold) {
  one_shot(ex, data, data, numel, fold, -1);
}

// The all-gather's segments queue behind the reduce-scatter's on each link, and both directions of
// every link are busy from the first byte to the last. They arrive in `data` where our own
// contribution lay, which their owner must have had before it could send the result.
void two_shot_all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold) {
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(ex, element);
  const auto list = even_chunks(static_cast<const void*>(data), numel, ex.size(), element);
  const ConstParts chunks = ConstParts(list).of(element);
  const auto writable = even_chunks(data, numel, ex.size(), element);
  const Parts results = Parts(writable).of(element);
  scatter_reduce(ex, chunks, results[ex.rank()].data, fold, [&](const Span<uint8_t>& s) {
    for (int i = 1; i < ex.size(); i++) ex.send(ex.after(i), s.data, s.size);
  });
  for (int i = 1; i < ex.size(); i++) {
    for_each_segment(results[ex.after(i)], segment * element,
                     [&](const Span<uint8_t>& s) { ex.recv(ex.after(i), s.data, s.size); });
  }
  ex.wait_all();
}

void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold) {
  scatter_reduce(ex, in, out, fold, [](const Span<uint8_t>&) {});
  ex.wait_all();
}

void one_shot_reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold,
                     int root) {
  one_shot(ex, in, out, numel, fold, root);
}

void two_shot_reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold,
                     int root) {
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(ex, element);
  const auto list = even_chunks(in, numel, ex.size(), element);
  const ConstParts chunks = ConstParts(list).of(element);
  const bool here = root == ex.rank();
  const auto writable = even_chunks(out, here ? numel : 0, ex.size(), element);
  const Parts results = Parts(writable).of(element);
  std::unique_ptr<uint8_t[]> temporary(here ? nullptr : new uint8_t[chunks.bytes(ex.rank())]);
  uint8_t* result = here ? results[root].data : temporary.get();
  scatter_reduce(ex, chunks, result, fold, [&](const Span<uint8_t>& s) {
    if (!here) ex.send(root, s.data, s.size);
  });
  for (int i = 1; here && i < ex.size(); i++) {
    for_each_segment(results[ex.after(i)], segment * element,
                     [&](const Span<uint8_t>& s) { ex.recv(ex.after(i), s.data, s.size); });
  }
  ex.wait_all();
}

}  // namespace pycomm::direct
