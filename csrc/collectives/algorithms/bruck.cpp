#include "collectives/algorithms/bruck.h"

#include <cstring>

namespace pycomm::bruck {
namespace {

// Gathers all parts in rotated order: part i, from starts[i] to starts[i + 1] of `parts`, is that
// of the i-th rank after us. Our own part, part 0, is there already.
void gather_rotated(CollectiveContext& context, uint8_t* parts, const std::vector<size_t>& starts) {
  const size_t n = context.size();
  for (size_t have = 1; have < n; have *= 2) {
    const size_t more = std::min(have, n - have);
    const int source = context.after(static_cast<int>(have)),
              to = context.after(static_cast<int>(n - have));
    context.send(to, parts, starts[more]);
    const size_t bytes = starts[have + more] - starts[have];
    context.wait(source, context.recv(source, parts + starts[have], bytes));
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

void all_gather(CollectiveContext& context, const void* in, const Parts& out) {
  const int n = context.size();
  std::vector<size_t> starts{0};
  for (int i = 0; i < n; i++) starts.push_back(starts.back() + out.bytes(context.after(i)));
  uint8_t* parts = context.scratch(starts.back());
  copy(parts, in, starts[1]);
  gather_rotated(context, parts, starts);
  for (int i = 0; i < n; i++) {
    const Span<uint8_t> part = out[context.after(i)];
    copy(part.data, parts + starts[i], part.size);
  }
  context.wait_all();
}

void all_reduce(CollectiveContext& context, void* data, size_t numel, const Fold& fold) {
  const size_t bytes = numel * size_of(fold.dtype);
  uint8_t* parts = context.scratch(context.size() * bytes);
  copy(parts, data, bytes);
  gather_rotated(context, parts, equal_starts(context.size(), bytes));
  std::vector<const void*> inputs(context.size());
  for (int i = 0; i < context.size(); i++) inputs[context.after(i)] = parts + i * bytes;
  fold(inputs.data(), context.size(), data, numel);
  context.wait_all();
}

void barrier(CollectiveContext& context) {
  gather_rotated(context, nullptr, equal_starts(context.size(), 0));
  context.wait_all();
}

}  // namespace pycomm::bruck
