// Direct collectives that only move bytes.
#include <cstring>

#include "collectives/algorithms/direct.h"
#include "collectives/common/schedule.h"
#include "collectives/common/select.h"

namespace pycomm::direct {
namespace {

using schedule::Range;

// Copies bytes. Buffers may be null when they are empty, and the same when an operation is in
// place.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

uint8_t* at(void* data, size_t offset) { return static_cast<uint8_t*>(data) + offset; }

}  // namespace

void all_gather(CollectiveContext& context, const void* in, const Parts& out) {
  const Span<uint8_t> own = out[context.rank()];
  for (int i = 1; i < context.size(); i++) {
    const Span<uint8_t> theirs = out[context.after(i)];
    context.send(context.after(i), in, own.size);
    context.recv(context.after(i), theirs.data, theirs.size);
  }
  copy(own.data, in, own.size);
  context.wait_all();
}

// Empty parts travel too: a rank that expects more gets an error at once.
void all_to_all(CollectiveContext& context, const ConstParts& in, const Parts& out) {
  context.note_algo("one_shot");
  for (int i = 1; i < context.size(); i++) {
    const int peer = context.after(i);
    context.send(peer, in[peer].data, in[peer].size);
    context.recv(peer, out[peer].data, out[peer].size);
  }
  const int me = context.rank();
  copy(out[me].data, in[me].data, in[me].size);
  context.wait_all();
}

void one_shot_broadcast(CollectiveContext& context, void* data, size_t bytes, int root) {
  if (context.rank() != root) {
    context.recv(root, data, bytes);
  } else {
    for (int i = 1; i < context.size(); i++) context.send(context.after(i), data, bytes);
  }
  context.wait_all();
}

// The root sends each rank one chunk, and that rank passes it on to the others segment by segment.
// The root's own chunk goes to all ranks.
void two_shot_broadcast(CollectiveContext& context, void* data, size_t bytes, int root) {
  const int n = context.size();
  const size_t segment = plain_segment(context.segment_bytes(), context.speed());
  const auto chunk = [&](int rank) {
    return schedule::chunk(bytes, n, rank, schedule::line(1), context.shares());
  };
  const auto send = [&](int peer, const Range& s) {
    context.send(peer, at(data, s.begin), s.size());
  };
  const auto recv = [&](int peer, const Range& s) {
    return context.recv(peer, at(data, s.begin), s.size());
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

void gather(CollectiveContext& context, const void* in, size_t bytes, const Parts& out, int root) {
  context.note_algo("one_shot");
  if (context.rank() != root) {
    context.send(root, in, bytes);
  } else {
    for (int i = 1; i < context.size(); i++) {
      const Span<uint8_t> theirs = out[context.after(i)];
      context.recv(context.after(i), theirs.data, theirs.size);
    }
    copy(out[root].data, in, bytes);
  }
  context.wait_all();
}

void scatter(CollectiveContext& context, const ConstParts& in, void* out, size_t bytes, int root) {
  context.note_algo("one_shot");
  if (context.rank() != root) {
    context.recv(root, out, bytes);
  } else {
    for (int i = 1; i < context.size(); i++) {
      const Span<const uint8_t> theirs = in[context.after(i)];
      context.send(context.after(i), theirs.data, theirs.size);
    }
    copy(out, in[root].data, bytes);
  }
  context.wait_all();
}

// Every rank sends every other an empty message: no rank returns before the last one has called,
// and an absent rank is named.
void barrier(CollectiveContext& context) {
  for (int i = 1; i < context.size(); i++) {
    context.send(context.after(i), nullptr, 0);
    context.recv(context.after(i), nullptr, 0);
  }
  context.wait_all();
}

}  // namespace pycomm::direct
