// Runs the operations of the "pycomm" process group: torch/engine.h. A part of _c10d.
#include "binding/torch/engine.h"

namespace pycomm::torch_binding {

std::string Engine::describe() {
  std::string text = comm_.describe();
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, found] : peers_) {
    const auto [type, index, kind] = key;
    text += "; on " + c10::Device(type, index).str();
    if (kind == PeerRoute::Kind::coded) text += " with codecs";
    text += " " + (found.route ? found.route->describe() : "by way of the host: " + found.why);
  }
  return text;
}

void Engine::set_timeout(Milliseconds timeout) {
  comm_.set_timeout(timeout);
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, found] : peers_)
    if (found.route) found.route->set_timeout(timeout);
}

// ------------------------------------------------------------------ devices, by way of the host

namespace {

/// Returns what the parts from `first` on deliver, for the case that it is no result.
FailedDelivery failed_delivery(const std::vector<DevicePart>& parts, size_t first,
                               const std::vector<std::shared_ptr<c10::Event>>& fetched) {
  FailedDelivery failed;
  for (size_t i = first; i < parts.size(); i++) {
    if (i < fetched.size()) failed.fetched.push_back(fetched[i]);
    for (const auto& [device, host] : parts[i].writes) failed.results.push_back(host);
  }
  return failed;
}

void add_memory(const std::vector<Mirror>& mirrors, std::vector<const void*>& memory) {
  for (const auto& [device, host] : mirrors) memory.push_back(device.storage().data());
}

}  // namespace

DeviceLane& Engine::lane(c10::Device device, bool of_peers) {
  auto& lane = lanes_[{device.type(), device.index(), of_peers}];
  if (!lane) lane = std::make_unique<DeviceLane>(device);
  used_device_ = device;
  return *lane;
}

std::optional<c10::Device> Engine::used_device() {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  return used_device_;
}

void Engine::await(const c10::Event& event, const Call& call, c10::Device device) {
  const Deadline deadline =
      Deadline::after(call.timeout.count() > 0 ? call.timeout : comm_.timeout());
  stay_on(device);
  Backoff backoff;
  while (!event.query()) {
    // The operation must not run on what was not fetched.
    if (const auto error = aborted_ ? comm_.over() : nullptr) std::rethrow_exception(error);
    if (deadline.expired()) {
      const std::string why = "did not reach its " + std::string(call.name) +
                              ": the work that was queued before it on " + device.str() +
                              " was not done within " + std::to_string(deadline.limit().count()) +
                              " ms";
      abort(why);
      throw Timeout("rank " + std::to_string(comm_.rank()) + " " + why);
    }
    backoff.wait();
  }
}

void Engine::follow_deliveries(const std::vector<const void*>& reads, DeviceLane& lane,
                               std::unique_lock<std::mutex>& lock) {
  const auto over = [](const Pending& p) {
    const auto work = p.work.lock();
    return (!work || work->is_queued()) && p.delivered->query();
  };
  const auto writes_them = [&](const Pending& p) {
    return std::any_of(p.memory.begin(), p.memory.end(), [&](const void* m) {
      return std::find(reads.begin(), reads.end(), m) != reads.end();
    });
  };
  const auto unqueued = [&]() -> intrusive_ptr<DeviceWork> {
    for (const Pending& p : pending_) {
      auto work = p.work.lock();
      if (writes_them(p) && work && !work->is_queued()) return work;
    }
    return {};
  };
  pending_.erase(std::remove_if(pending_.begin(), pending_.end(), over), pending_.end());
  while (const auto work = queue_.inside() ? nullptr : unqueued()) {
    lock.unlock();  // its callbacks may come here
    work->wait_until_queued();
    lock.lock();
  }
  for (const Pending& p : pending_)
    if (writes_them(p)) lane.follow(*p.delivered);
}

intrusive_ptr<DeviceWork> Engine::submit(const Call& call, Tensors outputs, c10::Device device,
                                         const std::vector<DevicePart>& parts) {
  check_lost();
  const WithoutGil without_gil;  // another thread may need it before it lets the lock go
  std::unique_lock<std::mutex> lock(device_mutex_);  // streams have the order of the queue
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::DeviceGuard on(device);
  DeviceLane& lane = this->lane(device);
  // A barrier is for the host. An operation from a callback overtakes others, holds must not.
  const bool held = lane.can_hold() && call.type != OpType::BARRIER && !queue_.inside();

  std::vector<const void*> read, written;
  for (const DevicePart& part : parts) {
    add_memory(part.reads, read);
    add_memory(part.writes, written);
  }
  follow_deliveries(read, lane, lock);
  auto work = make_work<DeviceWork>(true, call, std::move(outputs), lane.deliver_stream(), held);
  const auto delivered = work->delivered();
  lane.begin();
  if (call.type == OpType::BARRIER) lane.follow_deliveries();
  std::vector<std::shared_ptr<c10::Event>> fetched;
  for (const DevicePart& part : parts) fetched.push_back(lane.fetch(part.reads));
  const uint32_t first = held ? lane.number_holds(parts.size()) : 0;
  auto run = [=, engine = this, raw = work.get(), gate = lane.gate(), &lane](Communicator& comm) {
    size_t done = 0;
    try {
      for (; done < parts.size(); done++) {
        engine->await(*fetched[done], call, lane.device());
        parts[done].op(comm);
        held ? gate->open(first + static_cast<uint32_t>(done)) : lane.deliver(parts[done].writes);
      }
    } catch (...) {
      if (held) {
        // Whoever has the GIL may wait for the stream: the hold ends before the error is
        // translated.
        engine->set_lost(std::current_exception());
        raw->set_lost(std::current_exception());
        gate->fail(first + static_cast<uint32_t>(parts.size() - 1),
                   failed_delivery(parts, done, fetched));
      }
      throw;
    }
    if (!held) delivered->record(lane.deliver_stream());
  };
  pending_.push_back({written, delivered, c10::weak_intrusive_ptr<DeviceWork>(work)});
  if (queue_.inside()) lock.unlock();  // it runs now, and callbacks of its own may come here
  submit(intrusive_ptr<Work>(work), std::move(run), device);
  if (!held) return work;
  // The driver may let us wait for what is behind a hold, which the group's thread ends.
  try {
    for (size_t i = 0; i < parts.size(); i++) {
      lane.hold(first + static_cast<uint32_t>(i));
      lane.deliver(parts[i].writes);
    }
    delivered->record(lane.deliver_stream());
    work->promise();
  } catch (...) {  // what was queued behind holds will run, and is no result
    const auto error = std::current_exception();
    lock.unlock();
    abort("could not queue the results of its " + std::string(call.name));
    leave_with(error);
  }
  return work;
}

// ------------------------------------------------------------------ routes among devices

void Engine::check_lost() {
  std::exception_ptr lost;
  {
    const std::lock_guard<std::mutex> lock(lost_mutex_);
    lost = lost_;
  }
  if (lost) leave_with(lost);
}

void Engine::check() {
  check_lost();
  std::vector<std::shared_ptr<PeerRoute>> routes;
  {
    const std::lock_guard<std::mutex> lock(routes_mutex_);
    for (const auto& [key, found] : peers_)
      if (found.route) routes.push_back(found.route);
  }
  for (const auto& route : routes) with_python_errors([&] { route->check(); });
}

void Engine::interrupt_check() {
  check_signals();
  if (const std::exception_ptr error = comm_.over()) std::rethrow_exception(error);
  for (int r = 0; r < comm_.size(); r++) {
    if (r != comm_.rank() && comm_.lost(r))
      throw_error(lost(r,
                       "died or left before the ranks had set up the memory that their devices "
                       "share; look at its own log"));
  }
}

Engine::RouteOrReason Engine::open_peers(c10::Device device, PeerRoute::Kind kind) {
  constexpr size_t kWord = 96;
  if (device_path_ != "auto") return {nullptr, "device_path=" + device_path_};
  if (comm_.size() == 1) return {nullptr, "the group has one rank"};
  const auto exchange = [&](std::string word) {
    word.resize(kWord);
    std::string words(kWord * comm_.size(), 0);
    queue_.run([&] { comm_.exchange_paths(word.data(), words.data(), kWord); });
    for (int r = 0; r < comm_.size(); r++)
      if (words.compare(r * kWord, kWord, word) != 0) return std::string();
    return word.substr(0, word.find('\0'));
  };
  const c10::DeviceGuard on(device);
  const std::string host = peer_host(device);
  if (exchange(host).empty())
    return {nullptr, host.empty() ? "this pycomm has no kernels for " + device.str()
                                  : "the devices of some ranks are of another host or type"};
  RouteOrReason opened{nullptr, "the memory of another rank's device is not reached"};
  try {
    const std::string name = kind == PeerRoute::Kind::exact ? "/peers" : "/coded";
    TraceOwner owner = comm_.trace().owner();
    owner.group += name + " on " + c10::Device(device).str();
    // Each route of this group has a new name in the store.
    opened.route = std::make_shared<PeerRoute>(
        store_, comm_.rank(), comm_.size(), group_ + name + std::to_string(peers_.size()), device,
        kind, comm_.timeout(), Trace::make(std::move(owner)), [this] { interrupt_check(); },
        secret_);
    if (!watch_) watch_.emplace([this] { look_for_lost_peers(); });
  } catch (const Error& error) {  // the host is one, but its ranks share no memory
    opened.why = error.what();
  }
  const bool open = opened.route && watch_;
  if (exchange(open ? "open" : "").empty()) return {nullptr, opened.why};
  return {opened.route, ""};
}

Engine::RouteOrReason Engine::peers(c10::Device device, PeerRoute::Kind kind) {
  return with_python_errors([&] {
    const WithoutGil without_gil;
    const std::lock_guard<std::mutex> opening(opening_mutex_);
    const std::tuple key{device.type(), device.index(), kind};
    {
      const std::lock_guard<std::mutex> lock(routes_mutex_);
      if (const auto found = peers_.find(key); found != peers_.end()) return found->second;
    }
    if (is_capturing(device))
      throw Error("rank " + std::to_string(comm_.rank()) +
                  ": the first collective of its kind on " + device.str() +
                  " cannot be captured, since it sets up memory that the ranks share; run one "
                  "before the capture");
    RouteOrReason found = open_peers(device, kind);
    const std::lock_guard<std::mutex> lock(routes_mutex_);
    return peers_[key] = std::move(found);
  });
}

void Engine::look_for_lost_peers() noexcept {
  try {
    for (int r = 0; r < comm_.size(); r++) {
      if (r == comm_.rank() || !comm_.lost(r)) continue;
      const std::lock_guard<std::mutex> lock(routes_mutex_);
      for (const auto& [key, found] : peers_)
        if (found.route) found.route->lose(r);
    }
  } catch (const std::exception& e) {  // the operations end by their timeouts
    warn_once("rank " + std::to_string(comm_.rank()) +
              ": cannot look whether other ranks live: " + e.what());
  }
}

void Engine::abort_peers(const std::string& reason) noexcept {
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, found] : peers_)
    if (found.route) found.route->abort(reason);
}

intrusive_ptr<DeviceWork> Engine::submit(const Call& call, Tensors outputs,
                                         const std::shared_ptr<PeerRoute>& route,
                                         const Tensors& used,
                                         const std::function<void(PeerRoute&)>& op) {
  return with_python_errors([&] {
    const WithoutGil without_gil;
    const std::lock_guard<std::mutex> lock(device_mutex_);
    route->check();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::DeviceGuard on(route->device());
    const bool captured = is_capturing(route->device());
    DeviceLane& lane = this->lane(route->device());
    const OpTag tag = issued_tag(call, outputs, comm_.size());
    auto work = make_work<DeviceWork>(false, call, std::move(outputs), lane.deliver_stream(), true);
    work->set_check([route] { route->check(); });
    lane.begin(/*delivers=*/true);
    lane.keep(used, lane.deliver_stream());
    {
      const c10::StreamGuard on(lane.deliver_stream());
      route->call(op, captured);
    }
    work->delivered()->record(lane.deliver_stream());
    // The event of a capture can never be queried, and the trace does not see replays.
    if (!captured) route->set_last(tag, work->delivered());
    work->promise();
    work->complete();
    return work;
  });
}

// ------------------------------------------------------------------ sends and receives

std::shared_ptr<Communicator::Request> Engine::request(const Call& call, const Flat& flat, int peer,
                                                       int tag) {
  return call.type == OpType::SEND ? comm_.send(flat.in(), flat.bytes(), peer, tag)
                                   : comm_.recv(flat.out(), flat.bytes(), peer, tag);
}

WorkPtr Engine::keep(intrusive_ptr<PeerWork> work, Communicator::Request& request) {
  work->set_engine(weak_from_this());
  request.keep(std::shared_ptr<KeptWork>(new KeptWork{work}));
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
    const c10::DeviceGuard on(tensor.device());
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
        self->dispose(std::move(leaving), device);
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
  const c10::DeviceGuard on(mirror.device.device());
  DeviceLane& lane = this->lane(mirror.device.device(), /*of_peers=*/true);
  lane.deliver({mirror});
  done.record(lane.deliver_stream());
}

void Engine::settle_later(intrusive_ptr<PeerWork> work) {
  {
    const std::lock_guard<std::mutex> lock(wanted_mutex_);
    wanted_.push_back(work);
  }
  peer_waiter_.submit([self = shared_from_this(), work = std::move(work)]() mutable {
    work->settle();
    {
      const std::lock_guard<std::mutex> lock(self->wanted_mutex_);
      self->wanted_.erase(std::find(self->wanted_.begin(), self->wanted_.end(), work));
    }
    if (const auto device = work->device()) self->dispose(std::move(work), *device);
  });
}

// ------------------------------------------------------------------ the end

std::exception_ptr Engine::finish() {
  std::exception_ptr interrupted;
  const auto run_out = [&](Queue& queue) {
    for (;;) {
      try {
        return ending_if_interrupted([&] { queue.run([] {}); });
      } catch (const Interrupted&) {  // what is queued ends soon, since the group is aborted
        interrupted = std::current_exception();
      }
    }
  };
  run_out(queue_);
  bool unanswered;
  {
    const std::lock_guard<std::mutex> lock(wanted_mutex_);
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
  run_out(leaving_);
  run_out(peer_waiter_);
  run_out(disposal_);
  return interrupted;
}

void Engine::end_within(Milliseconds limit, const std::string& why) {
  const Deadline deadline = Deadline::after(limit);
  for (auto pause = std::chrono::microseconds(50); !queue_.idle() && !deadline.expired();
       pause = std::min<std::chrono::microseconds>(2 * pause, Milliseconds(5)))
    std::this_thread::sleep_for(pause);
  if (!queue_.idle()) abort(why);
}

}  // namespace pycomm::torch_binding
