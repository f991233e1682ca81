// Sends and receives of the "pycomm" process group, and several operations as one. A part of _c10d.
#include "binding/c10d_backend.h"

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
  return noted(engine()->post(call, arguments_.only(call, tensors), peer, tag));
}

WorkPtr Engine::post(const Call& call, const at::Tensor& tensor, int peer, int tag) {
  return with_python_errors([&]() -> WorkPtr {
    const Flat flat(tensor);
    auto request = call.type == OpType::SEND ? comm_.send(flat.in(), flat.bytes(), peer, tag)
                                             : comm_.recv(flat.out(), flat.bytes(), peer, tag);
    auto work = c10::make_intrusive<PeerWork>(comm_.rank(), call, ++peer_seq_, tensor, flat,
                                              std::move(request));
    work->set_engine(weak_from_this());
    work->start();
    // Its buffer must outlive the request, whether or not the caller keeps the work.
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    posted_.erase(std::remove_if(posted_.begin(), posted_.end(),
                                 [](const auto& posted) { return posted->done(); }),
                  posted_.end());
    posted_.push_back(work);
    return work;
  });
}

void Engine::settle_later(intrusive_ptr<PeerWork> work) {
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    wanted_.push_back(work);
  }
  peer_waiter_.submit([self = shared_from_this(), work = std::move(work)] {
    work->settle();
    const std::lock_guard<std::mutex> lock(self->posted_mutex_);
    self->wanted_.erase(std::find(self->wanted_.begin(), self->wanted_.end(), work));
  });
}

void Engine::settle_all() {
  drain();
  std::vector<intrusive_ptr<PeerWork>> posted;
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    posted = posted_;
  }
  for (const auto& work : posted) work->settle();
}

void Engine::finish() {
  drain();
  bool unanswered;
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    unanswered =
        std::any_of(wanted_.begin(), wanted_.end(), [](auto& work) { return !work->done(); });
  }
  // Else those who wait for their futures would wait for the whole deadline.
  if (unanswered) abort("left while sends or receives were under way");
}

bool PeerWork::wait(Milliseconds timeout) {
  try {
    request_->wait(timeout);
  } catch (...) {
    if (const auto engine = engine_.lock()) engine->note(std::current_exception());
    std::rethrow_exception(as_python(std::current_exception()));
  }
  settle();
  return Work::wait();
}

void PeerWork::settle() {
  std::call_once(settled_, [this] {
    const auto engine = engine_.lock();
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      request_->wait();
      if (opType_ != OpType::SEND) flat_.finish();
    } catch (...) {
      error = std::current_exception();
      if (engine) engine->note(error);
    }
    stop();
    error ? fail(error) : complete();
    if (engine) engine->report(*this);
  });
}

intrusive_ptr<Future> PeerWork::getFuture() {
  if (!isCompleted()) {
    if (const auto engine = engine_.lock())
      engine->settle_later(intrusive_ptr<PeerWork>::unsafe_reclaim_from_nonowning(this));
  }
  return Work::getFuture();
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
  if (coalescing_) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

}  // namespace pycomm::torch_binding
