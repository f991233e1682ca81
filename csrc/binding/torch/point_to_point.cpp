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

std::shared_ptr<Communicator::Request> Engine::request(const Call& call, const Flat& flat, int peer,
                                                       int tag) {
  return call.type == OpType::SEND ? comm_.send(flat.in(), flat.bytes(), peer, tag)
                                   : comm_.recv(flat.out(), flat.bytes(), peer, tag);
}

WorkPtr Engine::keep(intrusive_ptr<PeerWork> work, Communicator::Request& request) {
  work->set_engine(weak_from_this());
  work->start();
  std::shared_ptr<KeptWork> kept(new KeptWork{work});
  Posted posted{kept, {}};
  if (timed_ || work->copies()) posted.reported = work->expect_report();
  const auto ended = [](const Posted& earlier) {
    return earlier.kept.expired() &&
           (!earlier.reported.valid() ||
            earlier.reported.wait_for(Milliseconds(0)) == std::future_status::ready);
  };
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    posted_.erase(std::remove_if(posted_.begin(), posted_.end(), ended), posted_.end());
    posted_.push_back(std::move(posted));
  }
  request.keep(std::move(kept));
  return work;
}

WorkPtr Engine::post(const Call& call, const at::Tensor& tensor, int peer, int tag) {
  return with_python_errors([&] {
    const Flat flat(tensor);
    std::shared_ptr<Communicator::Request> request;
    const auto post = [&] { request = this->request(call, flat, peer, tag); };
    // Sends are matched in the order of issue, so one from the CPU waits for those from devices.
    call.type == OpType::SEND && !leaving_.idle() ? leaving_.run(post) : post();
    return keep(
        c10::make_intrusive<PeerWork>(comm_.rank(), call, ++peer_seq_, tensor, flat, request),
        *request);
  });
}

WorkPtr Engine::post(const Call& call, const at::Tensor& tensor, const Staging& staging,
                     const at::Tensor& host, int peer, int tag) {
  return with_python_errors([&] {
    const WithoutGil without_gil;
    std::unique_lock<std::mutex> lock(device_mutex_);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    DeviceLane& lane = this->lane(tensor.device(), /*of_peers=*/true);
    lane.begin();
    const auto fetched = lane.fetch(staging.reads());
    const Flat flat(host);
    std::shared_ptr<Communicator::Request> request;
    if (call.type == OpType::SEND) {
      const auto late = std::make_shared<LateSend>();
      struct Leaving {
        std::shared_ptr<c10::Event> fetched;
        Flat flat;
      };
      leaving_.submit([=, self = shared_from_this(), device = tensor.device(),
                       leaving = std::make_shared<Leaving>(Leaving{fetched, flat})]() mutable {
        try {
          self->await(*leaving->fetched, call, device);
          late->set(self->request(call, leaving->flat, peer, tag));
        } catch (...) {
          late->fail(std::current_exception());
        }
        self->dispose(std::move(leaving));
      });
      request = late;
    } else {
      request = this->request(call, flat, peer, tag);
    }
    auto work = c10::make_intrusive<DevicePeerWork>(comm_.rank(), call, ++peer_seq_, tensor, flat,
                                                    request, lane.deliver_stream());
    lock.unlock();  // completing the work may take the lock
    return keep(std::move(work), *request);
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
  std::vector<std::shared_future<void>> reports;
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    for (const auto& each : posted_) {
      if (const auto kept = each.kept.lock()) posted.push_back(kept->work);
      if (each.reported.valid()) reports.push_back(each.reported);
    }
  }
  for (const auto& work : posted) work->wait_until_settled();
  // A work is complete before its hook is called, and its request before data are copied, perhaps
  // by a thread that still is about to.
  if (InHook::depth() == 0)
    for (const auto& report : reports) report.wait();
}

void Engine::finish() {
  drain();
  bool unanswered;
  {
    const std::lock_guard<std::mutex> lock(posted_mutex_);
    unanswered = !leaving_.idle() || std::any_of(wanted_.begin(), wanted_.end(),
                                                 [](auto& work) { return !work->done(); });
  }
  // Otherwise threads that wait for their futures would wait for the whole deadline.
  if (unanswered) abort("left while sends or receives were under way");
  // Other threads may wait for theirs: they get the error that the group is closed, and have left
  // when this returns.
  comm_.end_requests();
  // Their works hold this engine and Python tensors: the last of them must be destroyed before the
  // caller lets the interpreter end, for a thread that then asks for the GIL is ended in the middle
  // of C++.
  leaving_.run([] {});
  peer_waiter_.run([] {});
  disposal_.run([] {});
}

void Engine::finish_within(Milliseconds limit, const std::string& why) {
  const Deadline deadline = Deadline::after(limit);
  for (auto pause = std::chrono::microseconds(50); !queue_.idle() && !deadline.expired();
       pause = std::min<std::chrono::microseconds>(2 * pause, Milliseconds(5)))
    std::this_thread::sleep_for(pause);
  if (!queue_.idle()) abort(why);
  drain();
}

bool PeerWork::wait(Milliseconds timeout) {
  try {
    request_->wait(timeout);
  } catch (...) {
    if (const auto engine = engine_.lock()) engine->note(std::current_exception());
    leave_with(std::current_exception());
  }
  settle();
  // Another thread may be about to complete it: no queued operation has to run for that.
  return wait_until_complete();
}

void PeerWork::settle() {
  if (settled_.exchange(true)) return;
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
  flat_.reset();
  stop();
  if (error && InterpreterEnd::has_begun()) return;  // threads that wait in torch stay there
  {
    const Engine::InHook in_callback;
    end(error);
  }
  if (engine) engine->report(*this);
  if (reported_) reported_->set_value();
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
  InterpreterEnd::stay_if_begun();  // torch's binding asks for the GIL next
  if (coalescing_) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

}  // namespace pycomm::torch_binding
