#include "collectives/ring.h"

#include <cstring>
#include <memory>

#include "collectives/stream.h"

namespace pycomm::ring {
namespace {

using Bytes = Span<uint8_t>;

// What goes around: one chunk per rank, cut into segments.
struct Loop {
  size_t segment_bytes;  // whole elements
  std::vector<Bytes> chunks;

  size_t count(int chunk) const { return schedule::divide_up(chunks[chunk].size, segment_bytes); }
  Bytes at(int chunk, size_t s) const {
    const size_t begin = s * segment_bytes;
    return chunks[chunk].sub(begin, std::min(segment_bytes, chunks[chunk].size - begin));
  }
};

// What is received in one turn, in the order in which the rank before us sends it.
struct Arrival {
  int step;
  Bytes place;
  uint64_t ticket = 0;
};

// Chunk first, first-1, ... of `steps` steps, all their segments.
std::vector<Arrival> arrivals(const Exchange& ex, const Loop& loop, int first, int steps) {
  std::vector<Arrival> result;
  for (int k = 0; k < steps; k++) {
    const int chunk = ex.after(first - k + 2 * ex.size());
    for (size_t s = 0; s < loop.count(chunk); s++) result.push_back({k, loop.at(chunk, s)});
  }
  return result;
}

void send(Exchange& ex, const Bytes& s) { ex.send(ex.after(1), s.data, s.size); }

void send_all(Exchange& ex, const Loop& loop, int chunk) {
  for (size_t s = 0; s < loop.count(chunk); s++) send(ex, loop.at(chunk, s));
}

// Afterwards our own chunk holds the result and has been sent to the next rank if `forward`.
// Contributions are prepared. Each partial sum is folded into the loop, so its slot is free again
// at once: no rank ever waits for the next one before it receives, and the ring cannot lock up.
void reduce_around(Exchange& ex, const Loop& loop, const Fold& fold, bool forward) {
  const int n = ex.size(), left = ex.after(n - 1), last = n - 2;
  send_all(ex, loop, left);
  std::vector<Arrival> incoming = arrivals(ex, loop, -2, n - 1);
  uint8_t* scratch = ex.scratch(kReceivesAhead * loop.segment_bytes);
  const auto slot = [&](size_t i) { return scratch + i % kReceivesAhead * loop.segment_bytes; };
  const auto receive = [&](size_t i) {
    incoming[i].ticket = ex.recv(left, slot(i), incoming[i].place.size);
  };

  for (size_t i = 0; i < std::min(kReceivesAhead, incoming.size()); i++) receive(i);
  for (size_t i = 0; i < incoming.size(); i++) {
    const Arrival& arrival = incoming[i];
    ex.wait(left, arrival.ticket);
    uint8_t* own = arrival.place.data;
    const Fold step = arrival.step == last ? fold.last(n) : fold.between();
    join(step, slot(i), own, own, arrival.place.size / size_of(fold.dtype));
    if (arrival.step < last || forward) send(ex, arrival.place);
    if (i + kReceivesAhead < incoming.size()) receive(i + kReceivesAhead);
  }
}

// Our own chunk is on its way already; the others come around and are passed on.
void gather_around(Exchange& ex, const Loop& loop) {
  const int n = ex.size(), left = ex.after(n - 1);
  std::vector<Arrival> incoming = arrivals(ex, loop, -1, n - 1);
  for (Arrival& arrival : incoming) {
    arrival.ticket = ex.recv(left, arrival.place.data, arrival.place.size);
  }
  for (const Arrival& arrival : incoming) {
    ex.wait(left, arrival.ticket);
    if (arrival.step < n - 2) send(ex, arrival.place);
  }
}

size_t segment_bytes(const Exchange& ex, size_t element) {
  return stream::segment_numel(ex, element) * element;
}

}  // namespace

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold) {
  const size_t element = size_of(fold.dtype);
  auto* bytes = static_cast<uint8_t*>(data);
  Loop loop{segment_bytes(ex, element), {}};
  for (int r = 0; r < ex.size(); r++) {
    const schedule::Range chunk = schedule::chunk(numel, ex.size(), r, schedule::line(element));
    loop.chunks.push_back({bytes + chunk.begin * element, chunk.size() * element});
  }
  fold.prepare(data, data, numel);
  reduce_around(ex, loop, fold, true);
  gather_around(ex, loop);
  ex.wait_all();
}

// The input is the caller's, so partial sums live in a copy of it.
void reduce_scatter(Exchange& ex, const ConstParts& in, void* out, const Fold& fold) {
  const size_t element = size_of(fold.dtype);
  const std::unique_ptr<uint8_t[]> work(new uint8_t[in.total(ex.size()) * element]);
  Loop loop{segment_bytes(ex, element), {}};
  uint8_t* place = work.get();
  for (int r = 0; r < ex.size(); r++) {
    loop.chunks.push_back({place, in.bytes(r)});
    fold.prepare(in[r].data, place, in.numel(r));
    place += in.bytes(r);
  }
  reduce_around(ex, loop, fold, false);
  ex.wait_all();
  const Bytes own = loop.chunks[ex.rank()];
  if (own.size > 0) std::memcpy(out, own.data, own.size);
}

void all_gather(Exchange& ex, const void* in, const Parts& out) {
  Loop loop{segment_bytes(ex, 1), {}};
  for (int r = 0; r < ex.size(); r++) loop.chunks.push_back(out[r]);
  const Bytes own = out[ex.rank()];
  if (own.size > 0 && own.data != in) std::memmove(own.data, in, own.size);
  send_all(ex, loop, ex.rank());
  gather_around(ex, loop);
  ex.wait_all();
}

}  // namespace pycomm::ring
