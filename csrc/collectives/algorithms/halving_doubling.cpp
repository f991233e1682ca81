#include "collectives/algorithms/halving_doubling.h"

#include <cstring>
#include <memory>

#include "collectives/algorithms/stream.h"

namespace pycomm::halving_doubling {
namespace {

using schedule::Range;

// Corners of a cube of p = 2^k ranks. A corner represents itself and its pair rank, if it has one;
// the chunks of the two lie side by side.
struct Cube {
  int corners = 1;
  int pairs = 0;

  explicit Cube(int ranks) {
    while (corners * 2 <= ranks) corners *= 2;
    pairs = ranks - corners;
  }
  /// Returns the rank of a corner; also the first chunk that it owns.
  int rank(int corner) const { return corner + std::min(corner, pairs); }
  bool has_partner(int rank) const { return rank < 2 * pairs; }
  bool is_silent(int rank) const { return has_partner(rank) && rank % 2 == 1; }
  int corner(int rank) const { return rank - (has_partner(rank) ? rank / 2 : pairs); }
};

// A buffer of one chunk per rank; chunk r starts at bounds[r].
struct Buffer {
  uint8_t* data;
  size_t element;
  std::vector<size_t> bounds;

  /// Returns the chunks of corners first <= c < last.
  Range of(const Cube& cube, int first, int last) const {
    return {bounds[cube.rank(first)], bounds[cube.rank(last)]};
  }
  Range all() const { return {bounds.front(), bounds.back()}; }
  uint8_t* at(size_t i) const { return data + i * element; }
};

// Adds what `peer` sends of `range` to ours. The lower rank's contribution is the first operand.
void join_from(CollectiveContext& context, int peer, const Buffer& buffer, Range range,
               uint8_t* slots, const Fold& fold) {
  stream::visit(context, peer, range, buffer.element, slots, [&](Range s, const uint8_t* theirs) {
    uint8_t* ours = buffer.at(s.begin);
    const bool first = peer < context.rank();
    join(fold, first ? theirs : ours, first ? ours : theirs, ours, s.size());
  });
}

// Reduce-scatter by halving: afterwards the corner's chunks hold the result.
void reduce_by_halving(CollectiveContext& context, const Cube& cube, const Buffer& buffer,
                       const Fold& fold) {
  const int me = context.rank();
  if (cube.is_silent(me))
    return stream::send(context, me - 1, buffer.data, buffer.all(), buffer.element);
  uint8_t* slots =
      context.scratch(stream::slots_bytes(context, buffer.all().size(), buffer.element));
  const auto step = [&](bool last) { return last ? fold : fold.between(); };
  if (cube.has_partner(me)) {
    join_from(context, me + 1, buffer, buffer.all(), slots, step(cube.corners == 1));
  }
  int first = 0, last = cube.corners;
  const int corner = cube.corner(me);
  while (last - first > 1) {
    const int half = (last - first) / 2, middle = first + half;
    const bool low = corner < middle;
    const int peer = cube.rank(low ? corner + half : corner - half);
    const Range lower = buffer.of(cube, first, middle), upper = buffer.of(cube, middle, last);
    stream::send(context, peer, buffer.data, low ? upper : lower, buffer.element);
    join_from(context, peer, buffer, low ? lower : upper, slots, step(half == 1));
    (low ? last : first) = middle;
  }
}

// All-gather by doubling, from the corner's chunks to all chunks. A range arrives where our
// contribution to it lay, which its sender must have had before.
void gather_by_doubling(CollectiveContext& context, const Cube& cube, const Buffer& buffer) {
  const int me = context.rank(), corner = cube.corner(me);
  const auto bytes = [&](Range range) { return range.size() * buffer.element; };
  for (int half = 1; half < cube.corners; half *= 2) {
    const int first = corner / half * half, other = first ^ half;
    const int peer = cube.rank(corner ^ half);
    const Range ours = buffer.of(cube, first, first + half),
                theirs = buffer.of(cube, other, other + half);
    context.send(peer, buffer.at(ours.begin), bytes(ours));
    context.wait(peer, context.recv(peer, buffer.at(theirs.begin), bytes(theirs)));
  }
}

std::vector<size_t> even_bounds(size_t numel, int ranks, size_t element) {
  std::vector<size_t> bounds;
  for (int r = 0; r < ranks; r++) {
    bounds.push_back(schedule::chunk(numel, ranks, r, schedule::line(element)).begin);
  }
  bounds.push_back(numel);
  return bounds;
}

/// Bounds of the parts; `size(r)` is the size of part r.
template <typename Size>
std::vector<size_t> bounds_of_parts(int ranks, const Size& size) {
  std::vector<size_t> bounds{0};
  for (int r = 0; r < ranks; r++) bounds.push_back(bounds.back() + size(r));
  return bounds;
}

}  // namespace

void all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold) {
  const Cube cube(context.size());
  const size_t element = size_of(fold.dtype);
  const Buffer buffer{static_cast<uint8_t*>(data), element,
                      even_bounds(numel, context.size(), element)};
  const int me = context.rank();
  reduce_by_halving(context, cube, buffer, fold.last(context.size()));
  if (cube.is_silent(me)) {
    stream::recv(context, me - 1, data, buffer.all(), element);
  } else {
    gather_by_doubling(context, cube, buffer);
    if (cube.has_partner(me)) stream::send(context, me + 1, data, buffer.all(), element);
  }
  context.wait_all();
}

// Partial results live in a copy of the input, which is the caller's.
void reduce_scatter(CollectiveContext& context, const ConstParts& in, void* out, const Fold& fold) {
  const Cube cube(context.size());
  const int me = context.rank();
  const size_t element = size_of(fold.dtype);
  const std::unique_ptr<uint8_t[]> work(new uint8_t[in.total(context.size()) * element]);
  const Buffer buffer{work.get(), element,
                      bounds_of_parts(context.size(), [&](int r) { return in.numel(r); })};
  const auto part = [&](int r) { return buffer.at(buffer.bounds[r]); };
  for (int r = 0; r < context.size(); r++) {
    if (in.bytes(r) > 0) std::memcpy(part(r), in[r].data, in.bytes(r));
  }
  reduce_by_halving(context, cube, buffer, fold.last(context.size()));
  if (cube.is_silent(me)) {
    stream::recv(context, me - 1, out, {0, in.numel(me)}, element);
  } else {
    if (cube.has_partner(me))
      stream::send(context, me + 1, part(me + 1), {0, in.numel(me + 1)}, element);
    if (in.numel(me) > 0) std::memcpy(out, part(me), in.bytes(me));
  }
  context.wait_all();
}

// A list is gathered in one buffer first, since ranges of several parts travel at once.
void all_gather(CollectiveContext& context, const void* in, const Parts& out) {
  const Cube cube(context.size());
  const int me = context.rank();
  Buffer buffer{static_cast<uint8_t*>(out.data()), 1,
                bounds_of_parts(context.size(), [&](int r) { return out.bytes(r); })};
  const size_t all = buffer.all().size();
  std::unique_ptr<uint8_t[]> work;
  if (out.is_list()) {
    work.reset(new uint8_t[all]);
    buffer.data = work.get();
  }
  const auto part = [&](int r) { return buffer.at(buffer.bounds[r]); };
  if (out.bytes(me) > 0 && part(me) != in) std::memmove(part(me), in, out.bytes(me));
  if (cube.is_silent(me)) {
    context.send(me - 1, part(me), out.bytes(me));
    context.recv(me - 1, buffer.data, all);
  } else {
    const bool speaks_for_two = cube.has_partner(me);
    if (speaks_for_two) context.wait(me + 1, context.recv(me + 1, part(me + 1), out.bytes(me + 1)));
    gather_by_doubling(context, cube, buffer);
    if (speaks_for_two) context.send(me + 1, buffer.data, all);
  }
  context.wait_all();
  for (int r = 0; out.is_list() && r < context.size(); r++) {
    if (out.bytes(r) > 0) std::memcpy(out[r].data, part(r), out.bytes(r));
  }
}

}  // namespace pycomm::halving_doubling
