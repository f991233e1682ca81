#include "collectives/algorithms/node.h"

#include <cstring>

#include "transports/shm/window.h"

namespace pycomm {
namespace {

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

dispatch::Route Node::route(const OpTag& tag) {
  return site_ ? dispatch::Route(*site_, Algo::direct) : dispatch::Route(*window_, tag, deadline_);
}

void Node::all_reduce(void* data, size_t numel, const Fold& fold) {
  if (alone()) return;
  const OpTag tag = step(numel, fold.dtype, fold.op);
  dispatch::all_reduce(route(tag), data, numel, fold);
}

void Node::reduce_scatter(const ConstParts& in, void* out, const Fold& fold) {
  if (alone()) {
    if (in.bytes(0) > 0) std::memmove(out, in[0].data, in.bytes(0));
    return;
  }
  const OpTag tag = step(in.total(size_), fold.dtype, fold.op);
  dispatch::reduce_scatter(route(tag), in, out, fold);
}

void Node::all_gather(const void* in, const Parts& out) {
  if (alone()) {
    if (out.bytes(0) > 0 && out[0].data != in) std::memmove(out[0].data, in, out.bytes(0));
    return;
  }
  std::vector<Part> bytes;
  for (int p = 0; p < size_; p++) bytes.push_back({out[p].data, out[p].size});
  const OpTag tag = step(Parts(bytes).total(size_), DType::uint8);
  dispatch::all_gather(route(tag), in, bytes);
}

void Node::broadcast(void* data, size_t bytes, int place) {
  if (alone()) return;
  OpTag tag = step(bytes, DType::uint8);
  tag.root = place;
  dispatch::broadcast(route(tag), data, bytes, place);
}

void Node::barrier() {
  if (alone()) return;
  const OpTag tag = step(0, DType::uint8);
  dispatch::barrier(route(tag));
}

}  // namespace pycomm
