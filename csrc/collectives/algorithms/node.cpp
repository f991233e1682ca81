#include "collectives/algorithms/node.h"

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
      deadline_(context.deadline().begun()),  // the context is copied, too
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

void Node::run(const Collective& step) {
  if (!site_ && !window_) {  // we are alone
    return copy_bytes(step.out[0].data, step.in[0].data, step.in.bytes(0));
  }
  const size_t numel = step.bytes(size_) / size_of(step.dtype);
  // Without an op: errors name the call.
  const OpTag tag = make_tag(Op::none, numel, step.dtype, step.redop, step.root);
  dispatch::run(
      site_ ? dispatch::Route(*site_, Algo::direct) : dispatch::Route(*window_, tag, deadline_),
      step);
}

void Node::all_gather(const void* in, const Parts& out) {
  std::vector<Part> bytes;
  for (int p = 0; p < size_; p++) bytes.push_back({out[p].data, out[p].size});
  run({Op::all_gather, DType::uint8, {in, out[place_].size}, bytes});
}

}  // namespace pycomm
