// Sends and receives of the "pycomm" process group, and several operations as one. A part of _c10d.
#include "binding/torch/backend.h"

namespace pycomm::torch_binding {

// ------------------------------------------------------------------ sends and receives

WorkPtr Backend::send(Tensors& tensors, int dst, int tag) {
  return post("pycomm:send", OpType::SEND, tensors, dst, tag);
}
WorkPtr Backend::recv(Tensors& tensors, int src, int tag) {
  return post("pycomm:recv", OpType::RECV, tensors, src, tag);
}
WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return post("pycomm:recvAnySource", OpType::RECVANYSOURCE, tensors, -1, tag);
}

WorkPtr Backend::post(const char* title, OpType type, Tensors& tensors, int peer, int tag) {
  const Call call(title, type, c10d::BarrierOptions());
  const bool sends = type == OpType::SEND;
  const at::Tensor& tensor =
      sends ? arguments_.only(call, tensors) : arguments_.only_written(call, tensors);
  if (type != OpType::RECVANYSOURCE)
    arguments_.check_peer(call, sends ? "the destination" : "the source", peer);
  arguments_.check_tag(call, tag);
  if (tensor.is_cpu()) return noted(engine()->post(call, tensor, peer, tag));
  Staging staging(*this, call, Staging::By::host);
  const at::Tensor host = sends ? staging.in(tensor) : staging.out(tensor);
  return noted(engine()->post(call, tensor, staging, host, peer, tag));
}

// ------------------------------------------------------------------ several as one

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalesced_.clear();
  coalescing_ = true;
}

WorkPtr Backend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalescing_ = false;
  if (coalesced_.empty()) return nullptr;
  return c10::make_intrusive<CoalescedWork>(rank_, std::exchange(coalesced_, {}));
}

WorkPtr Backend::noted(WorkPtr work) {
  InterpreterEnd::stay_if_begun();  // torch's binding asks for the GIL next
  if (coalescing_) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

}  // namespace pycomm::torch_binding
