// Direct collectives that reduce. Those that only move bytes: direct_move.cpp.
#include "collectives/algorithms/direct.h"

#include <memory>

#include "collectives/algorithms/stream.h"

namespace pycomm::direct {
namespace {

using schedule::Range;

/// A buffer cut into one chunk per rank, by the ranks' shares.
template <typename T>
std::vector<BasicPart<T>> chunks_of(const CollectiveContext& context, T* data, size_t numel,
                                    size_t element) {
  using Byte = typename BasicParts<T>::Byte;
  const int ranks = context.size();
  std::vector<BasicPart<T>> chunks(ranks);
  for (int r = 0; r < ranks; r++) {
    const Range range = schedule::chunk(numel, ranks, r, schedule::line(element), context.shares());
    chunks[r] = {static_cast<Byte*>(data) + range.begin * element, range.size()};
  }
  return chunks;
}

/// Calls visit(its bytes) for each segment of a chunk.
template <typename Byte, typename Visit>
void for_each_segment(const Span<Byte>& chunk, size_t segment_bytes, const Visit& visit) {
  for (size_t begin = 0; begin < chunk.size; begin += segment_bytes) {
    visit(chunk.sub(begin, std::min(segment_bytes, chunk.size - begin)));
  }
}

// Sends every rank its part of `in` and folds ours into `out`. Calls reduced(segment of `out`) as
// soon as it is final. A few segments of every peer are received ahead while one is folded.
template <typename Reduced>
void scatter_reduce(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold,
                    const Reduced& reduced) {
  const int n = context.size();
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(context, element);
  for (int i = 1; i < n; i++) {
    for_each_segment(in[context.after(i)], segment * element, [&](const Span<const uint8_t>& s) {
      context.send(context.after(i), s.data, s.size);
    });
  }

  const Span<const uint8_t> source = in[context.rank()];
  const Range own{0, in.numel(context.rank())};
  const size_t count = schedule::num_segments(own, segment),
               slots = std::min(kReceivesAhead, count);
  const size_t slot_bytes = std::min(segment, own.size()) * element;
  uint8_t* scratch = context.scratch(slots * n * slot_bytes);
  std::vector<uint64_t> tickets(slots * n);
  const auto place = [&](size_t s, int rank) { return (s % slots) * n + rank; };
  const auto receive = [&](size_t s) {
    const size_t bytes = schedule::segment(own, segment, s).size() * element;
    for (int i = 1; i < n; i++) {
      const size_t at = place(s, context.after(i));
      tickets[at] = context.recv(context.after(i), scratch + at * slot_bytes, bytes);
    }
  };

  for (size_t s = 0; s < slots; s++) receive(s);
  std::vector<const void*> inputs(n);
  for (size_t s = 0; s < count; s++) {
    const Range range = schedule::segment(own, segment, s);
    for (int i = 1; i < n; i++) context.wait(context.after(i), tickets[place(s, context.after(i))]);
    for (int r = 0; r < n; r++) inputs[r] = scratch + place(s, r) * slot_bytes;
    inputs[context.rank()] = source.data + range.begin * element;
    uint8_t* result = static_cast<uint8_t*>(out) + range.begin * element;
    fold(inputs.data(), n, result, range.size());
    reduced(Span<uint8_t>(result, range.size() * element));
    if (s + slots < count) receive(s + slots);
  }
}

// Sends every rank's `in` to the ranks for which `here` is true, which fold all of them into `out`.
void one_shot(CollectiveContext& context, const void* in, void* out, size_t numel, const Fold& fold,
              int root) {
  const int n = context.size();
  const bool here = root < 0 || root == context.rank();
  const size_t bytes = numel * size_of(fold.dtype);
  uint8_t* scratch = here ? context.scratch(n * bytes) : nullptr;
  std::vector<const void*> inputs(n, in);
  for (int i = 1; i < n; i++) {
    const int peer = context.after(i);
    if (root < 0 || peer == root) context.send(peer, in, bytes);
    if (!here) continue;
    inputs[peer] = scratch + peer * bytes;
    context.recv(peer, scratch + peer * bytes, bytes);
  }
  context.wait_all();  // `out` may be `in`, which is sent until here
  if (here) fold(inputs.data(), n, out, numel);
}

}  // namespace

void one_shot_all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold) {
  one_shot(context, data, data, numel, fold, -1);
}

// The all-gather's segments queue behind the reduce-scatter's on each link, and both directions of
// every link are busy from the first byte to the last. They arrive in `data` where our own
// contribution lay, which their owner must have had before it could send the result.
void two_shot_all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold) {
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(context, element);
  const auto list = chunks_of(context, static_cast<const void*>(data), numel, element);
  const ConstParts chunks = ConstParts(list).of(element);
  const auto writable = chunks_of(context, data, numel, element);
  const Parts results = Parts(writable).of(element);
  scatter_reduce(context, chunks, results[context.rank()].data, fold, [&](const Span<uint8_t>& s) {
    for (int i = 1; i < context.size(); i++) context.send(context.after(i), s.data, s.size);
  });
  for (int i = 1; i < context.size(); i++) {
    for_each_segment(results[context.after(i)], segment * element, [&](const Span<uint8_t>& s) {
      context.recv(context.after(i), s.data, s.size);
    });
  }
  context.wait_all();
}

void reduce_scatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold) {
  scatter_reduce(context, in, out, fold, [](const Span<uint8_t>&) {});
  context.wait_all();
}

void one_shot_reduce(CollectiveContext& context, const void* in, void* out, size_t numel,
                     const Fold& fold, int root) {
  one_shot(context, in, out, numel, fold, root);
}

void two_shot_reduce(CollectiveContext& context, const void* in, void* out, size_t numel,
                     const Fold& fold, int root) {
  const size_t element = size_of(fold.dtype), segment = stream::segment_numel(context, element);
  const auto list = chunks_of(context, in, numel, element);
  const ConstParts chunks = ConstParts(list).of(element);
  const bool here = root == context.rank();
  const auto writable = chunks_of(context, out, here ? numel : 0, element);
  const Parts results = Parts(writable).of(element);
  std::unique_ptr<uint8_t[]> temporary(here ? nullptr : new uint8_t[chunks.bytes(context.rank())]);
  uint8_t* result = here ? results[root].data : temporary.get();
  scatter_reduce(context, chunks, result, fold, [&](const Span<uint8_t>& s) {
    if (!here) context.send(root, s.data, s.size);
  });
  for (int i = 1; here && i < context.size(); i++) {
    for_each_segment(results[context.after(i)], segment * element, [&](const Span<uint8_t>& s) {
      context.recv(context.after(i), s.data, s.size);
    });
  }
  context.wait_all();
}

}  // namespace pycomm::direct
