#include "collectives/algorithms/algorithms.h"

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

}  // namespace

void all_gather(CollectiveContext& context, const Collective& call) {
  const Parts& out = call.out;
  const int n = context.size();
  std::vector<size_t> starts{0};
  for (int i = 0; i < n; i++) starts.push_back(starts.back() + out.bytes(context.after(i)));
  uint8_t* parts = context.scratch(starts.back());
  copy_bytes(parts, call.in.data(), starts[1]);
  gather_rotated(context, parts, starts);
  for (int i = 0; i < n; i++) {
    const Span<uint8_t> part = out[context.after(i)];
    copy_bytes(part.data, parts + starts[i], part.size);
  }
  context.wait_all();
}

void all_reduce(CollectiveContext& context, const Collective& call) {
  const size_t bytes = call.in.bytes(0);
  uint8_t* parts = context.scratch(context.size() * bytes);
  copy_bytes(parts, call.in.data(), bytes);
  gather_rotated(context, parts, equal_starts(context.size(), bytes));
  std::vector<const void*> inputs(context.size());
  for (int i = 0; i < context.size(); i++) inputs[context.after(i)] = parts + i * bytes;
  call.fold()(inputs.data(), context.size(), call.out.data(), call.in.numel(0));
  context.wait_all();
}

void barrier(CollectiveContext& context, const Collective&) {
  gather_rotated(context, nullptr, equal_starts(context.size(), 0));
  context.wait_all();
}

}  // namespace pycomm::bruck
