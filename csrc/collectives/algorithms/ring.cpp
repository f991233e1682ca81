#include <cstring>
#include <memory>

#include "collectives/algorithms/algorithms.h"
#include "collectives/common/schedule.h"

namespace pycomm::ring {
namespace {

using Bytes = Span<uint8_t>;

// The buffer that goes around: one chunk per rank, cut into segments.
struct Loop {
  size_t segment_bytes;  // whole elements
  std::vector<Bytes> chunks;

  size_t count(int chunk) const { return schedule::divide_up(chunks[chunk].size, segment_bytes); }
  Bytes at(int chunk, size_t s) const {
    const size_t begin = s * segment_bytes;
    return chunks[chunk].sub(begin, std::min(segment_bytes, chunks[chunk].size - begin));
  }
};

// A receive of one turn, in the order in which the previous rank sends.
struct Arrival {
  int step;
  Bytes place;
  uint64_t ticket = 0;
};

// Returns all segments of chunks first, first-1, ... for `steps` steps.
std::vector<Arrival> arrivals(const CollectiveContext& context, const Loop& loop, int first,
                              int steps) {
  std::vector<Arrival> result;
  for (int k = 0; k < steps; k++) {
    const int chunk = context.after(first - k + 2 * context.size());
    for (size_t s = 0; s < loop.count(chunk); s++) result.push_back({k, loop.at(chunk, s)});
  }
  return result;
}

void send(CollectiveContext& context, const Bytes& s) {
  context.send(context.after(1), s.data, s.size);
}

void send_all(CollectiveContext& context, const Loop& loop, int chunk) {
  for (size_t s = 0; s < loop.count(chunk); s++) send(context, loop.at(chunk, s));
}

// Reduce-scatter: afterwards our own chunk holds the result and has been sent to the next rank if
// `forward`. Each partial sum is folded into the loop, so its slot is free again at once: no rank
// ever waits for the next one before it receives, and the ring cannot deadlock.
void reduce_around(CollectiveContext& context, const Loop& loop, const Fold& fold, bool forward) {
  const int n = context.size(), left = context.after(n - 1), last = n - 2;
  send_all(context, loop, left);
  std::vector<Arrival> incoming = arrivals(context, loop, -2, n - 1);
  uint8_t* scratch = context.scratch(kReceivesAhead * loop.segment_bytes);
  const auto slot = [&](size_t i) { return scratch + i % kReceivesAhead * loop.segment_bytes; };
  const auto receive = [&](size_t i) {
    incoming[i].ticket = context.recv(left, slot(i), incoming[i].place.size);
  };

  for (size_t i = 0; i < std::min(kReceivesAhead, incoming.size()); i++) receive(i);
  for (size_t i = 0; i < incoming.size(); i++) {
    const Arrival& arrival = incoming[i];
    context.wait(left, arrival.ticket);
    uint8_t* own = arrival.place.data;
    const Fold step = arrival.step == last ? fold.last(n) : fold.between();
    const void* parts[] = {slot(i), own};
    step(parts, 2, own, arrival.place.size / size_of(fold.dtype));
    if (arrival.step < last || forward) send(context, arrival.place);
    if (i + kReceivesAhead < incoming.size()) receive(i + kReceivesAhead);
  }
}

// All-gather: our own chunk is on its way already; the others come around and are passed on.
void gather_around(CollectiveContext& context, const Loop& loop) {
  const int n = context.size(), left = context.after(n - 1);
  std::vector<Arrival> incoming = arrivals(context, loop, -1, n - 1);
  for (Arrival& arrival : incoming) {
    arrival.ticket = context.recv(left, arrival.place.data, arrival.place.size);
  }
  for (const Arrival& arrival : incoming) {
    context.wait(left, arrival.ticket);
    if (arrival.step < n - 2) send(context, arrival.place);
  }
}

size_t segment_bytes(const CollectiveContext& context, size_t element) {
  return context.segment_numel(element) * element;
}

}  // namespace

void all_reduce(CollectiveContext& context, const Collective& call) {
  const size_t element = size_of(call.dtype), numel = call.in.numel(0);
  auto* bytes = static_cast<uint8_t*>(call.out.data());
  Loop loop{segment_bytes(context, element), {}};
  for (int r = 0; r < context.size(); r++) {
    const schedule::Range chunk =
        schedule::chunk(numel, context.size(), r, schedule::line(element));
    loop.chunks.push_back({bytes + chunk.begin * element, chunk.size() * element});
  }
  reduce_around(context, loop, call.fold(), true);
  gather_around(context, loop);
  context.wait_all();
}

// Partial sums live in a copy of the input, which is the caller's.
void reduce_scatter(CollectiveContext& context, const Collective& call) {
  const ConstParts& in = call.in;
  const size_t element = size_of(call.dtype);
  const std::unique_ptr<uint8_t[]> work(new uint8_t[in.total(context.size()) * element]);
  Loop loop{segment_bytes(context, element), {}};
  uint8_t* place = work.get();
  for (int r = 0; r < context.size(); r++) {
    loop.chunks.push_back({place, in.bytes(r)});
    if (in.bytes(r) > 0) std::memcpy(place, in[r].data, in.bytes(r));
    place += in.bytes(r);
  }
  reduce_around(context, loop, call.fold(), false);
  context.wait_all();
  const Bytes own = loop.chunks[context.rank()];
  if (own.size > 0) std::memcpy(call.out.data(), own.data, own.size);
}

void all_gather(CollectiveContext& context, const Collective& call) {
  const void* in = call.in.data();
  const Parts& out = call.out;
  Loop loop{segment_bytes(context, 1), {}};
  for (int r = 0; r < context.size(); r++) loop.chunks.push_back(out[r]);
  const Bytes own = out[context.rank()];
  if (own.size > 0 && own.data != in) std::memmove(own.data, in, own.size);
  send_all(context, loop, context.rank());
  gather_around(context, loop);
  context.wait_all();
}

}  // namespace pycomm::ring
