#include "collectives/ring.h"

#include <cstring>
#include <memory>

#include "collectives/schedule.h"
#include "collectives/select.h"
#include "core/reduce.h"

namespace pycomm::ring {
namespace {

using schedule::Range;

// A buffer that goes around: one chunk per rank, cut into segments.
struct Loop {
  uint8_t* data;
  size_t element;
  size_t segment;  // in elements
  std::vector<Range> chunks;

  size_t count(int chunk) const { return schedule::num_segments(chunks[chunk], segment); }
  Range at(int chunk, size_t s) const { return schedule::segment(chunks[chunk], segment, s); }
  uint8_t* begin(const Range& s) const { return data + s.begin * element; }
  size_t bytes(const Range& s) const { return s.size() * element; }
};

// What is received in one turn, in the order in which the rank before us sends it.
struct Arrival {
  int step;
  Range range;
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

void send(Exchange& ex, const Loop& loop, const Range& s) {
  ex.send(ex.after(1), loop.begin(s), loop.bytes(s));
}

// Afterwards our own chunk holds the result and has been sent to the next rank if `forward`.
// Each partial sum is folded into `data`, so its slot is free again at once: no rank ever waits
// for the next one before it receives, and the ring cannot lock up.
void reduce_around(Exchange& ex, const Loop& loop, const Fold& fold, bool forward) {
  const int n = ex.size(), left = ex.after(n - 1), last = n - 2;
  for (size_t s = 0; s < loop.count(left); s++) send(ex, loop, loop.at(left, s));

  std::vector<Arrival> incoming = arrivals(ex, loop, -2, n - 1);
  const size_t slot_bytes = loop.segment * loop.element;
  uint8_t* scratch = ex.scratch((kReceivesAhead + 1) * slot_bytes);
  uint8_t* zeros = scratch + kReceivesAhead * slot_bytes;
  const auto slot = [&](size_t i) { return scratch + i % kReceivesAhead * slot_bytes; };
  const auto receive = [&](size_t i) {
    incoming[i].ticket = ex.recv(left, slot(i), loop.bytes(incoming[i].range));
  };

  // The partial results of `avg` are sums. The last step divides by the number of inputs, so it is
  // given one per rank.
  const bool average = fold.op == ReduceOp::avg;
  if (average) std::memset(zeros, 0, slot_bytes);
  std::vector<const void*> inputs(n, zeros);
  for (size_t i = 0; i < std::min(kReceivesAhead, incoming.size()); i++) receive(i);
  for (size_t i = 0; i < incoming.size(); i++) {
    const Arrival& arrival = incoming[i];
    ex.wait(left, arrival.ticket);
    uint8_t* own = loop.begin(arrival.range);
    inputs[0] = slot(i);
    inputs[1] = own;
    const bool divide = average && arrival.step == last;
    const ReduceOp op = average && !divide ? ReduceOp::sum : fold.op;
    pycomm::reduce(
        {fold.dtype, op, inputs.data(), divide ? n : 2, own, nullptr, arrival.range.size()});
    if (arrival.step < last || forward) send(ex, loop, arrival.range);
    if (i + kReceivesAhead < incoming.size()) receive(i + kReceivesAhead);
  }
}

// Our own chunk is on its way already; the others come around and are passed on.
void gather_around(Exchange& ex, const Loop& loop) {
  const int n = ex.size(), left = ex.after(n - 1);
  std::vector<Arrival> incoming = arrivals(ex, loop, -1, n - 1);
  for (Arrival& arrival : incoming) {
    arrival.ticket = ex.recv(left, loop.begin(arrival.range), loop.bytes(arrival.range));
  }
  for (const Arrival& arrival : incoming) {
    ex.wait(left, arrival.ticket);
    if (arrival.step < n - 2) send(ex, loop, arrival.range);
  }
}

size_t segment_numel(const Exchange& ex, size_t element) {
  return std::max<size_t>(1, plain_segment(ex.segment_bytes()) / element);
}

// premul_sum multiplies every contribution before it starts its way; the rest is a sum.
Fold premultiply(const void* in, void* out, size_t numel, const Fold& fold) {
  pycomm::reduce({fold.dtype, fold.op, &in, 1, out, nullptr, numel, fold.factor});
  return {fold.dtype, ReduceOp::sum};
}

}  // namespace

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold) {
  ex.note_algo("ring");
  const size_t element = size_of(fold.dtype);
  Loop loop{static_cast<uint8_t*>(data), element, segment_numel(ex, element), {}};
  for (int r = 0; r < ex.size(); r++) {
    loop.chunks.push_back(schedule::chunk(numel, ex.size(), r, schedule::line(element)));
  }
  const bool scaled = fold.op == ReduceOp::premul_sum;
  reduce_around(ex, loop, scaled ? premultiply(data, data, numel, fold) : fold, true);
  gather_around(ex, loop);
  ex.wait_all();
}

// The input is the caller's, so partial sums live in a copy of it.
void reduce_scatter(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold) {
  ex.note_algo("ring");
  const size_t element = size_of(fold.dtype), n = ex.size(), total = n * numel;
  std::unique_ptr<uint8_t[]> work(new uint8_t[total * element]);
  Loop loop{work.get(), element, segment_numel(ex, element), {}};
  for (size_t r = 0; r < n; r++) loop.chunks.push_back({r * numel, (r + 1) * numel});
  Fold rest = fold;
  if (fold.op == ReduceOp::premul_sum) {
    rest = premultiply(in, work.get(), total, fold);
  } else if (total > 0) {
    std::memcpy(work.get(), in, total * element);
  }
  reduce_around(ex, loop, rest, false);
  ex.wait_all();
  if (numel > 0) std::memcpy(out, loop.begin(loop.chunks[ex.rank()]), numel * element);
}

void all_gather(Exchange& ex, const void* in, void* out, size_t bytes) {
  ex.note_algo("ring");
  Loop loop{static_cast<uint8_t*>(out), 1, segment_numel(ex, 1), {}};
  for (size_t r = 0; r < static_cast<size_t>(ex.size()); r++) {
    loop.chunks.push_back({r * bytes, (r + 1) * bytes});
  }
  uint8_t* own = loop.begin(loop.chunks[ex.rank()]);
  if (bytes > 0 && own != in) std::memmove(own, in, bytes);
  for (size_t s = 0; s < loop.count(ex.rank()); s++) send(ex, loop, loop.at(ex.rank(), s));
  gather_around(ex, loop);
  ex.wait_all();
}

}  // namespace pycomm::ring
