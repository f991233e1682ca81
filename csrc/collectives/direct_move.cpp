// Direct collectives that only move bytes.
#include <cstring>

#include "collectives/direct.h"
#include "collectives/schedule.h"
#include "collectives/select.h"

namespace pycomm::direct {
namespace {

using schedule::Range;

// Buffers may be null when they are empty, and the same when an operation is in place.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

uint8_t* at(void* data, size_t offset) { return static_cast<uint8_t*>(data) + offset; }

}  // namespace

void all_gather(Exchange& ex, const void* in, const Parts& out) {
  const Span<uint8_t> own = out[ex.rank()];
  for (int i = 1; i < ex.size(); i++) {
    const Span<uint8_t> theirs = out[ex.after(i)];
    ex.send(ex.after(i), in, own.size);
    ex.recv(ex.after(i), theirs.data, theirs.size);
  }
  copy(own.data, in, own.size);
  ex.wait_all();
}

// Empty parts travel too: a rank that expects more is told at once.
void all_to_all(Exchange& ex, const ConstParts& in, const Parts& out) {
  ex.note_algo("one_shot");
  for (int i = 1; i < ex.size(); i++) {
    const int peer = ex.after(i);
    ex.send(peer, in[peer].data, in[peer].size);
    ex.recv(peer, out[peer].data, out[peer].size);
  }
  const int me = ex.rank();
  copy(out[me].data, in[me].data, in[me].size);
  ex.wait_all();
}

void one_shot_broadcast(Exchange& ex, void* data, size_t bytes, int root) {
  if (ex.rank() != root) {
    ex.recv(root, data, bytes);
  } else {
    for (int i = 1; i < ex.size(); i++) ex.send(ex.after(i), data, bytes);
  }
  ex.wait_all();
}

// The root sends each rank one chunk, which that rank passes on to the others segment by segment.
// The root's own chunk goes to everybody.
void two_shot_broadcast(Exchange& ex, void* data, size_t bytes, int root) {
  const int n = ex.size();
  const size_t segment = plain_segment(ex.segment_bytes());
  const auto chunk = [&](int rank) { return schedule::chunk(bytes, n, rank, schedule::line(1)); };
  const auto send = [&](int peer, const Range& s) { ex.send(peer, at(data, s.begin), s.size()); };
  const auto recv = [&](int peer, const Range& s) {
    return ex.recv(peer, at(data, s.begin), s.size());
  };
  const auto count = [&](const Range& c) { return schedule::num_segments(c, segment); };
  const Range mine = chunk(ex.rank());

  if (ex.rank() == root) {
    size_t most = 0;
    for (int r = 0; r < n; r++) most = std::max(most, count(chunk(r)));
    for (size_t s = 0; s < most; s++) {
      for (int i = 1; i < n; i++) {
        const int peer = ex.after(i);
        const Range theirs = chunk(peer);
        if (s < count(theirs)) send(peer, schedule::segment(theirs, segment, s));
        if (s < count(mine)) send(peer, schedule::segment(mine, segment, s));
      }
    }
    return ex.wait_all();
  }

  // The same order in which the root sends.
  ex.set_source(root);
  const Range roots = chunk(root);
  std::vector<uint64_t> tickets;
  for (size_t s = 0; s < std::max(count(mine), count(roots)); s++) {
    if (s < count(mine)) tickets.push_back(recv(root, schedule::segment(mine, segment, s)));
    if (s < count(roots)) recv(root, schedule::segment(roots, segment, s));
  }
  for (int i = 1; i < n; i++) {
    const int peer = ex.after(i);
    if (peer == root) continue;
    for (size_t s = 0; s < count(chunk(peer)); s++) {
      recv(peer, schedule::segment(chunk(peer), segment, s));
    }
  }
  for (size_t s = 0; s < tickets.size(); s++) {
    ex.wait(root, tickets[s]);
    for (int i = 1; i < n; i++) {
      if (ex.after(i) != root) send(ex.after(i), schedule::segment(mine, segment, s));
    }
  }
  ex.wait_all();
}

void gather(Exchange& ex, const void* in, size_t bytes, const Parts& out, int root) {
  ex.note_algo("one_shot");
  if (ex.rank() != root) {
    ex.send(root, in, bytes);
  } else {
    for (int i = 1; i < ex.size(); i++) {
      const Span<uint8_t> theirs = out[ex.after(i)];
      ex.recv(ex.after(i), theirs.data, theirs.size);
    }
    copy(out[root].data, in, bytes);
  }
  ex.wait_all();
}

void scatter(Exchange& ex, const ConstParts& in, void* out, size_t bytes, int root) {
  ex.note_algo("one_shot");
  if (ex.rank() != root) {
    ex.recv(root, out, bytes);
  } else {
    for (int i = 1; i < ex.size(); i++) {
      const Span<const uint8_t> theirs = in[ex.after(i)];
      ex.send(ex.after(i), theirs.data, theirs.size);
    }
    copy(out, in[root].data, bytes);
  }
  ex.wait_all();
}

// An empty message from everybody: no rank leaves before the last one came, and whoever is absent
// is named.
void barrier(Exchange& ex) {
  for (int i = 1; i < ex.size(); i++) {
    ex.send(ex.after(i), nullptr, 0);
    ex.recv(ex.after(i), nullptr, 0);
  }
  ex.wait_all();
}

}  // namespace pycomm::direct
