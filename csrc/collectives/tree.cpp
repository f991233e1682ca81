#include "collectives/tree.h"

#include <cstring>

#include "collectives/stream.h"

namespace pycomm::tree {
namespace {

void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

// Our place in the tree. Ranks are numbered from the root on; the parent of number v is v without
// its lowest bit, so a subtree is a run of numbers.
class Place {
 public:
  Place(const Exchange& ex, int root) : size_(ex.size()), root_(root) {
    number_ = (ex.rank() - root + size_) % size_;
    while (span_ < size_ && (number_ & span_) == 0) span_ *= 2;
  }

  bool is_root() const { return number_ == 0; }
  int parent() const { return rank_of(number_ & (number_ - 1)); }
  /// Ranks in our subtree, ourselves first.
  int subtree() const { return std::min(span_, size_ - number_); }

  /// Calls visit(peer, distance, ranks in its subtree) for each child, the largest subtree first.
  template <typename Visit>
  void down(const Visit& visit) const {
    for (int d = span_ / 2; d > 0; d /= 2) visit_child(d, visit);
  }
  /// The same, the smallest subtree first: the one that is ready first.
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

// The inputs of our subtree, ours first, end in `parts`; all but the root pass them on.
void gather_up(Exchange& ex, const Place& place, uint8_t* parts, size_t bytes) {
  place.up([&](int peer, int distance, int ranks) {
    ex.recv(peer, parts + distance * bytes, ranks * bytes);
  });
  ex.wait_all();
  if (!place.is_root()) ex.send(place.parent(), parts, place.subtree() * bytes);
  ex.wait_all();
}

}  // namespace

void broadcast(Exchange& ex, void* data, size_t bytes, int root) {
  const Place place(ex, root);
  ex.set_source(root);
  auto* at = static_cast<uint8_t*>(data);
  const schedule::Range all{0, bytes};
  const size_t segment = stream::segment_numel(ex, 1);
  std::vector<uint64_t> tickets;
  if (!place.is_root()) tickets = stream::recv(ex, place.parent(), data, all, 1);
  for (size_t s = 0; s < schedule::num_segments(all, segment); s++) {
    if (!place.is_root()) ex.wait(place.parent(), tickets[s]);
    const schedule::Range part = schedule::segment(all, segment, s);
    place.down([&](int peer, int, int) { ex.send(peer, at + part.begin, part.size()); });
  }
  ex.wait_all();
}

void reduce(Exchange& ex, const void* in, void* out, size_t numel, const Fold& fold, int root) {
  const Place place(ex, root);
  const size_t element = size_of(fold.dtype), bytes = numel * element;
  if (!is_order_free(fold.dtype, fold.op)) {
    uint8_t* parts = ex.scratch(place.subtree() * bytes);
    copy(parts, in, bytes);
    gather_up(ex, place, parts, bytes);
    if (!place.is_root()) return;
    std::vector<const void*> inputs(ex.size());
    for (int i = 0; i < ex.size(); i++) inputs[(root + i) % ex.size()] = parts + i * bytes;
    return fold(inputs.data(), ex.size(), out, numel);
  }
  // The root's partial results are its own; the others' lie behind the slots.
  const size_t slots_bytes = stream::slots_bytes(ex, numel, element);
  uint8_t* slots = ex.scratch(slots_bytes + (place.is_root() ? 0 : bytes));
  uint8_t* partial = place.is_root() ? static_cast<uint8_t*>(out) : slots + slots_bytes;
  copy(partial, in, bytes);
  place.up([&](int peer, int distance, int) {
    const bool last = place.is_root() && distance * 2 >= ex.size();
    const Fold step = last ? fold.last(ex.size()) : fold.between();
    stream::visit(ex, peer, {0, numel}, element, slots,
                  [&](schedule::Range s, const uint8_t* theirs) {
                    uint8_t* ours = partial + s.begin * element;
                    join(step, ours, theirs, ours, s.size());
                  });
  });
  if (!place.is_root()) stream::send(ex, place.parent(), partial, {0, numel}, element);
  ex.wait_all();
}

}  // namespace pycomm::tree
