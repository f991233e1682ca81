#include "collectives/bruck.h"

#include <cstring>

namespace pycomm::bruck {
namespace {

// Afterwards part i, from starts[i] to starts[i + 1] of `parts`, is that of the i-th rank after us.
// Ours, part 0, is there already.
void gather_rotated(Exchange& ex, uint8_t* parts, const std::vector<size_t>& starts) {
  const size_t n = ex.size();
  for (size_t have = 1; have < n; have *= 2) {
    const size_t more = std::min(have, n - have);
    const int source = ex.after(static_cast<int>(have)), to = ex.after(static_cast<int>(n - have));
    ex.send(to, parts, starts[more]);
    const size_t bytes = starts[have + more] - starts[have];
    ex.wait(source, ex.recv(source, parts + starts[have], bytes));
  }
}

std::vector<size_t> equal_starts(int ranks, size_t bytes) {
  std::vector<size_t> starts;
  for (int i = 0; i <= ranks; i++) starts.push_back(i * bytes);
  return starts;
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

void all_gather(Exchange& ex, const void* in, const Parts& out) {
  const int n = ex.size();
  std::vector<size_t> starts{0};
  for (int i = 0; i < n; i++) starts.push_back(starts.back() + out.bytes(ex.after(i)));
  uint8_t* parts = ex.scratch(starts.back());
  copy(parts, in, starts[1]);
  gather_rotated(ex, parts, starts);
  for (int i = 0; i < n; i++) {
    const Span<uint8_t> part = out[ex.after(i)];
    copy(part.data, parts + starts[i], part.size);
  }
  ex.wait_all();
}

void all_reduce(Exchange& ex, void* data, size_t numel, const Fold& fold) {
  const size_t bytes = numel * size_of(fold.dtype);
  uint8_t* parts = ex.scratch(ex.size() * bytes);
  copy(parts, data, bytes);
  gather_rotated(ex, parts, equal_starts(ex.size(), bytes));
  std::vector<const void*> inputs(ex.size());
  for (int i = 0; i < ex.size(); i++) inputs[ex.after(i)] = parts + i * bytes;
  fold(inputs.data(), ex.size(), data, numel);
  ex.wait_all();
}

void barrier(Exchange& ex) {
  gather_rotated(ex, nullptr, equal_starts(ex.size(), 0));
  ex.wait_all();
}

}  // namespace pycomm::bruck
