#include "collectives/algorithms/tree.h"

#include <cstring>

#include "collectives/algorithms/stream.h"

namespace pycomm::tree {
namespace {

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

// Place of this rank in the tree. Ranks are numbered from the root on; the parent of number v is v
// without its lowest bit, so a subtree is a run of numbers.
class Place {
 public:
  Place(const CollectiveContext& context, int root) : size_(context.size()), root_(root) {
    number_ = (context.rank() - root + size_) % size_;
    while (span_ < size_ && (number_ & span_) == 0) span_ *= 2;
  }

  bool is_root() const { return number_ == 0; }
  int parent() const { return rank_of(number_ & (number_ - 1)); }
  /// Returns the number of ranks in our subtree, including this one.
  int subtree() const { return std::min(span_, size_ - number_); }

  /// Calls visit(peer, distance, ranks in its subtree) for each child, the largest subtree first.
  template <typename Visit>
  void down(const Visit& visit) const {
    for (int d = span_ / 2; d > 0; d /= 2) visit_child(d, visit);
  }
  /// Calls visit() likewise, the smallest subtree first: it is the first to be ready.
  template <typename Visit>
  void up(const Visit& visit) const {
    for (int d = 1; d < span_; d *= 2) visit_child(d, visit);
  }

 private:
  int rank_of(int number) const { return (number + root_) % size_; }
  template <typename Visit>
  void visit_child(int distance, const Visit& visit) const {
    if (number_ + distance >= size_) return;
    visit(rank_of(number_ + distance), distance, std::min(distance, size_ - number_ - distance));
  }

  int size_;
  int root_;
  int number_;
  int span_ = 1;  // children are at the powers of two below it
};

// Gathers the inputs of our subtree, ours first, in `parts`; all ranks but the root pass them on.
void gather_up(CollectiveContext& context, const Place& place, uint8_t* parts, size_t bytes) {
  place.up([&](int peer, int distance, int ranks) {
    context.recv(peer, parts + distance * bytes, ranks * bytes);
  });
  context.wait_all();
  if (!place.is_root()) context.send(place.parent(), parts, place.subtree() * bytes);
  context.wait_all();
}

}  // namespace

void broadcast(CollectiveContext& context, void* data, size_t bytes, int root) {
  const Place place(context, root);
  context.set_source(root);
  auto* at = static_cast<uint8_t*>(data);
  const schedule::Range all{0, bytes};
  const size_t segment = stream::segment_numel(context, 1);
  std::vector<uint64_t> tickets;
  if (!place.is_root()) tickets = stream::recv(context, place.parent(), data, all, 1);
  for (size_t s = 0; s < schedule::num_segments(all, segment); s++) {
    if (!place.is_root()) context.wait(place.parent(), tickets[s]);
    const schedule::Range part = schedule::segment(all, segment, s);
    place.down([&](int peer, int, int) { context.send(peer, at + part.begin, part.size()); });
  }
  context.wait_all();
}

void reduce(CollectiveContext& context, const void* in, void* out, size_t numel, const Fold& fold,
            int root) {
  const Place place(context, root);
  const size_t bytes = numel * size_of(fold.dtype);
  uint8_t* parts = context.scratch(place.subtree() * bytes);
  copy(parts, in, bytes);
  gather_up(context, place, parts, bytes);
  if (!place.is_root()) return;
  std::vector<const void*> inputs(context.size());
  for (int i = 0; i < context.size(); i++) inputs[(root + i) % context.size()] = parts + i * bytes;
  fold(inputs.data(), context.size(), out, numel);
}

}  // namespace pycomm::tree
