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
  const at::Tensor& tensor = arguments_.only(call, tensors);
  if (tensor.is_cpu()) return noted(engine()->post(call, tensor, peer, tag));
  Staging staging(*this, call, Staging::By::host);
  const at::Tensor host = type == OpType::SEND ? staging.in(tensor) : staging.out(tensor);
  return noted(engine()->post(call, tensor, staging, host, peer, tag));
}

std::shared_ptr<Communicator::Request> Engine::request(const Call& call, const Flat& flat, int peer,
                                                       int tag) {
  return call.type == OpType::SEND ? comm_.send(flat.in(), flat.bytes(), peer, tag)
                                   : comm_.recv(flat.out(), flat.bytes(), peer, tag);
}

WorkPtr Engine::keep(intrusive_ptr<PeerWork> work) {
  work->set_engine(weak_from_this());
  work->start();
  const std::lock_guard<std::mutex> lock(posted_mutex_);
  posted_.erase(std::remove_if(posted_.begin(), posted_.end(),
                               [](const auto& posted) { return posted->done(); }),
                posted_.end());
  posted_.push_back(work);
  return work;
}

WorkPtr Engine::post(const Call& call, const at::Tensor& tensor, int peer, int tag) {
  return with_python_errors([&] {
    const Flat flat(tensor);
    std::shared_ptr<Communicator::Request> request;
    const auto post = [&] { request = this->request(call, flat, peer, tag); };
    // Sends are matched in the order of issue, so one from the CPU waits for those from devices.
    call.type == OpType::SEND && !leaving_.idle() ? leaving_.run(post) : post();
    return keep(c10::make_intrusive<PeerWork>(comm_.rank(), call, ++peer_seq_, tensor, flat,
                                              std::move(request)));
  });
}

WorkPtr Engine::post(const Call& call, const at::Tensor& tensor, const Staging& staging,
                     const at::Tensor& host, int peer, int tag) {
  return with_python_errors([&] {
    const WithoutGil without_gil;
    const std::lock_guard<std::mutex> lock(device_mutex_);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    DeviceLane& lane = this->lane(tensor.device(), /*of_peers=*/true);
    lane.begin();
    const auto fetched = lane.fetch(staging.reads());
    const Flat flat(host);
    std::shared_ptr<Communicator::Request> request;
    if (call.type == OpType::SEND) {
      const auto late = std::make_shared<LateSend>();
      leaving_.submit([=, self = shared_from_this(), device = tensor.device()] {
        try {
          self->await(*fetched, call, device);
          late->set(self->request(call, flat, peer, tag));
        } catch (...) {
          late->fail(std::current_exception());
        }
      });
      request = late;
    } else {
      request = this->request(call, flat, peer, tag);
    }
    return keep(c10::make_intrusive<DevicePeerWork>(comm_.rank(), call, ++peer_seq_, tensor, flat,
                                                    std::move(request), lane.deliver_stream()));
  });
}

void Engine::deliver_peer(const Mirror& mirror, c10::Event& done) {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  DeviceLane& lane = this->lane(mirror.device.device(), /*of_peers=*/true);
  lane.deliver({mirror});
  done.record(lane.deliver_stream());
}

void DevicePeerWork::finish() {
  const auto engine = engine_.lock();
  if (!engine) throw Error(describe() + ": the process group is shut down");
  engine->deliver_peer(mirror_, *delivery_.done());
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
    unanswered = !leaving_.idle() || std::any_of(wanted_.begin(), wanted_.end(),
                                                 [](auto& work) { return !work->done(); });
  }
  // Else those who wait for their futures would wait for the whole deadline.
  if (unanswered) abort("left while sends or receives were under way");
  // Their works hold this engine and tensors of Python's: the last of them must go before the
  // caller lets the interpreter end, for a thread that then asks for it is ended in the middle of
  // C++.
  leaving_.run([] {});
  peer_waiter_.run([] {});
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
      if (opType_ != OpType::SEND) finish();
    } catch (...) {
      error = std::current_exception();
      if (engine) engine->note(error);
    }
    stop();
    error ? fail(error) : complete();
    if (engine) engine->report(*this);
  });
}

intrusive_ptr<Future> PeerWork::ended() {
  if (!isCompleted()) {
    if (const auto engine = engine_.lock())
      engine->settle_later(intrusive_ptr<PeerWork>::unsafe_reclaim_from_nonowning(this));
  }
  return Work::ended();
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
