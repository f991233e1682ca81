#include <memory>

#include "collectives/algorithms/algorithms.h"
#include "collectives/common/schedule.h"

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
  const size_t element = size_of(fold.dtype), segment = context.segment_numel(element);
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

}  // namespace

// Sends every rank's input to the ranks that get the result, which fold all of them.
void one_shot_reduce(CollectiveContext& context, const Collective& call) {
  const int n = context.size(), root = call.root;
  const bool here = root < 0 || root == context.rank();
  const void* in = call.in.data();
  const size_t bytes = call.in.bytes(0);
  uint8_t* scratch = here ? context.scratch(n * bytes) : nullptr;
  std::vector<const void*> inputs(n, in);
  for (int i = 1; i < n; i++) {
    const int peer = context.after(i);
    if (root < 0 || peer == root) context.send(peer, in, bytes);
    if (!here) continue;
    inputs[peer] = scratch + peer * bytes;
    context.recv(peer, scratch + peer * bytes, bytes);
  }
  context.wait_all();  // the output may be the input, which is sent until here
  if (here) call.fold()(inputs.data(), n, call.out.data(), call.in.numel(0));
}

// The owners' results queue behind the contributions on each link, and in an all_reduce both
// directions of every link are busy from the first byte to the last. They arrive where our own
// contribution may lie, which their owner must have had before it could send the result.
void two_shot_reduce(CollectiveContext& context, const Collective& call) {
  const int root = call.root;
  const size_t element = size_of(call.dtype), segment = context.segment_numel(element);
  const auto list = chunks_of(context, call.in.data(), call.in.numel(0), element);
  const ConstParts chunks = ConstParts(list).of(element);
  const bool here = root < 0 || root == context.rank();
  const auto writable = chunks_of(context, call.out.data(), here ? call.in.numel(0) : 0, element);
  const Parts results = Parts(writable).of(element);
  std::unique_ptr<uint8_t[]> temporary(here ? nullptr : new uint8_t[chunks.bytes(context.rank())]);
  uint8_t* result = here ? results[context.rank()].data : temporary.get();
  scatter_reduce(context, chunks, result, call.fold(), [&](const Span<uint8_t>& s) {
    for (int i = 1; root < 0 && i < context.size(); i++) {
      context.send(context.after(i), s.data, s.size);
    }
    if (!here) context.send(root, s.data, s.size);
  });
  for (int i = 1; here && i < context.size(); i++) {
    for_each_segment(results[context.after(i)], segment * element, [&](const Span<uint8_t>& s) {
      context.recv(context.after(i), s.data, s.size);
    });
  }
  context.wait_all();
}

void reduce_scatter(CollectiveContext& context, const Collective& call) {
  scatter_reduce(context, call.in, call.out.data(), call.fold(), [](const Span<uint8_t>&) {});
  context.wait_all();
}

// ------------------------------------------------------------------ what only moves bytes

// Every two ranks send each other the parts that they have for each other; in a rooted op only the
// root and each other rank do. Empty parts travel too: a rank that expects more gets an error at
// once, and from a barrier no rank returns before the last one has called.
void exchange(CollectiveContext& context, const Collective& call) {
  const int me = context.rank(), root = call.root;
  const auto travels = [&](int from, int to) {
    return root < 0 || root == (call.op == Op::gather ? to : from);
  };
  const auto given = [&](int to) { return call.in[call.has_in_parts() ? to : 0]; };
  const auto place = [&](int from) { return call.out[call.has_out_parts() ? from : 0]; };
  for (int i = 1; i < context.size(); i++) {
    const int peer = context.after(i);
    if (travels(me, peer)) context.send(peer, given(peer).data, given(peer).size);
    if (travels(peer, me)) context.recv(peer, place(peer).data, place(peer).size);
  }
  if (travels(me, me)) copy_bytes(place(me).data, given(me).data, given(me).size);
  context.wait_all();
}

// The root sends each rank one chunk, and that rank passes it on to the others segment by segment.
// The root's own chunk goes to all ranks.
void two_shot_broadcast(CollectiveContext& context, const Collective& call) {
  const int n = context.size(), root = call.root;
  const Span<uint8_t> data = call.out[0];
  const size_t segment = context.segment_numel(1);
  const auto chunk = [&](int rank) {
    return schedule::chunk(data.size, n, rank, schedule::line(1), context.shares());
  };
  const auto send = [&](int peer, const Range& s) {
    context.send(peer, data.data + s.begin, s.size());
  };
  const auto recv = [&](int peer, const Range& s) {
    return context.recv(peer, data.data + s.begin, s.size());
  };
  const auto count = [&](const Range& c) { return schedule::num_segments(c, segment); };
  const Range mine = chunk(context.rank());

  if (context.rank() == root) {
    size_t most = 0;
    for (int r = 0; r < n; r++) most = std::max(most, count(chunk(r)));
    for (size_t s = 0; s < most; s++) {
      for (int i = 1; i < n; i++) {
        const int peer = context.after(i);
        const Range theirs = chunk(peer);
        if (s < count(theirs)) send(peer, schedule::segment(theirs, segment, s));
        if (s < count(mine)) send(peer, schedule::segment(mine, segment, s));
      }
    }
    return context.wait_all();
  }

  // Receives are posted in the order in which the root sends.
  context.set_source(root);
  const Range roots = chunk(root);
  std::vector<uint64_t> tickets;
  for (size_t s = 0; s < std::max(count(mine), count(roots)); s++) {
    if (s < count(mine)) tickets.push_back(recv(root, schedule::segment(mine, segment, s)));
    if (s < count(roots)) recv(root, schedule::segment(roots, segment, s));
  }
  for (int i = 1; i < n; i++) {
    const int peer = context.after(i);
    if (peer == root) continue;
    for (size_t s = 0; s < count(chunk(peer)); s++) {
      recv(peer, schedule::segment(chunk(peer), segment, s));
    }
  }
  for (size_t s = 0; s < tickets.size(); s++) {
    context.wait(root, tickets[s]);
    for (int i = 1; i < n; i++) {
      if (context.after(i) != root) send(context.after(i), schedule::segment(mine, segment, s));
    }
  }
  context.wait_all();
}

}  // namespace pycomm::direct
