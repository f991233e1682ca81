#include "collectives/algorithms/node.h"

#include "collectives/algorithms/direct.h"
#include "collectives/window/shared.h"

namespace pycomm {
namespace {

// A broadcast in a site of up to this size takes one shot, as the messages of small buffers do.
constexpr size_t kOneShotBytes = size_t{32} << 10;

const std::vector<int>& members(const CollectiveContext& context) {
  return context.topology().node(context.topology().node_of(context.rank()));
}

// The memory that we share with others, if all ranks of our node share it.
Window* whole_window(const CollectiveContext& context) {
  Window* window = context.node_window();
  return window && static_cast<size_t>(window->size()) == members(context).size() ? window
                                                                                  : nullptr;
}

}  // namespace

Node::Node(const CollectiveContext& context)
    : window_(whole_window(context)),
      deadline_(context.deadline()),
      place_(context.topology().place_of(context.rank())),
      size_(static_cast<int>(members(context).size())) {
  if (!window_ && size_ > 1) {
    site_.emplace(context.among(members(context)));
    site_->use(scratch_);
  }
  if (window_)
    window_->hold(context.tag(), deadline_,
                  [call = CollectiveContext(context)]() mutable { return call.drive(); });
}

void Node::end() {
  if (window_) window_->release();
}

OpTag Node::step(size_t numel, DType dtype, ReduceOp redop) {
  OpTag tag;
  tag.numel = numel;
  tag.dtype = dtype;
  tag.redop = redop;
  return tag;
}

void Node::all_reduce(void* data, size_t numel, const Fold& fold) {
  if (site_) return direct::one_shot_all_reduce(*site_, data, numel, fold);
  if (!window_) return;
  shared::all_reduce(*window_, step(numel, fold.dtype, fold.op), data, deadline_);
}

void Node::reduce_scatter(const ConstParts& in, void* out, const Fold& fold) {
  if (site_) return direct::reduce_scatter(*site_, in, out, fold);
  if (!window_) {
    if (in.bytes(0) > 0) std::memmove(out, in[0].data, in.bytes(0));
    return;
  }
  const OpTag tag = step(in.total(size_), fold.dtype, fold.op);
  shared::reduce_scatter(*window_, tag, in, out, deadline_);
}

void Node::all_gather(const void* in, const Parts& out) {
  if (site_) return direct::all_gather(*site_, in, out);
  if (window_) {
    std::vector<Part> bytes;
    for (int p = 0; p < size_; p++) bytes.push_back({out[p].data, out[p].size});
    const OpTag tag = step(Parts(bytes).total(size_), DType::uint8);
    return shared::all_gather(*window_, tag, in, bytes, deadline_);
  }
  if (out.bytes(0) > 0 && out[0].data != in) std::memmove(out[0].data, in, out.bytes(0));
}

void Node::broadcast(void* data, size_t bytes, int place) {
  if (site_ && bytes <= kOneShotBytes) {
    return direct::one_shot_broadcast(*site_, data, bytes, place);
  }
  if (site_) return direct::two_shot_broadcast(*site_, data, bytes, place);
  if (!window_) return;
  OpTag tag = step(bytes, DType::uint8);
  tag.root = place;
  shared::broadcast(*window_, tag, data, deadline_);
}

void Node::barrier() {
  if (site_) return direct::barrier(*site_);
  if (window_) shared::barrier(*window_, step(0, DType::uint8), deadline_);
}

}  // namespace pycomm
