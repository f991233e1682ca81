// Peer routes: which ranks have one among their accelerators, and the operations on it. A part of
// _c10d.
#include "binding/torch/peers.h"

#include <fstream>
#include <set>

#include "binding/torch/backend.h"
#include "core/device.h"

namespace pycomm::torch_binding {
namespace {

struct HostAddressable {
  std::mutex mutex;
  std::set<c10::DeviceType> types;
};

HostAddressable& host_addressable() {
  static HostAddressable types;
  return types;
}

bool is_host_addressable(c10::DeviceType type) {
  auto& known = host_addressable();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.types.count(type) > 0;
}

}  // namespace

void set_host_addressable(c10::DeviceType type, bool addressable) {
  auto& known = host_addressable();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (addressable) {
    known.types.insert(type);
  } else {
    known.types.erase(type);
  }
}

std::string peer_host(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const bool cuda = device.is_cuda() && device::built() && device.index() < device::count() &&
                    native_handle(guard.getStreamFromGlobalPool(device), 0);
  if (!cuda && !is_host_addressable(device.type())) return "";
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  return boot.empty() ? "" : c10::DeviceTypeName(device.type(), true) + " " + boot;
}

// ------------------------------------------------------------------ the route

namespace {

/// The staging for the few numbers on which ranks agree beside their payloads.
constexpr size_t kStagingOfCoded = size_t{2} << 20;

DeviceGroupOptions options_of(const std::string& group, PeerRoute::Kind kind, Milliseconds timeout,
                              std::function<void()> interrupt_check) {
  DeviceGroupOptions options;
  options.group = group;
  options.timeout = timeout;
  options.interrupt_check = std::move(interrupt_check);
  if (kind == PeerRoute::Kind::exact) {
    options.coded_bytes = 0;
  } else {
    options.staging_bytes = kStagingOfCoded;
  }
  return options;
}

}  // namespace

PeerRoute::PeerRoute(std::shared_ptr<Store> store, int rank, int size, const std::string& group,
                     c10::Device device, Kind kind, Milliseconds timeout,
                     std::shared_ptr<Trace> trace, std::function<void()> interrupt_check)
    : device_(device),
      group_(std::move(store), rank, size, device.is_cuda() ? device.index() : -1,
             options_of(group, kind, timeout, std::move(interrupt_check))),
      trace_(std::move(trace)) {
  trace_->set_look([this] { look(); });
}

void PeerRoute::check() const {
  try {
    group_.check();
  } catch (const Error& error) {
    trace_->set_error(error.what());
    throw;
  }
}

void PeerRoute::set_last(OpTag tag, std::shared_ptr<c10::Event> event) {
  look();
  last_ = event;
  const std::lock_guard<std::mutex> lock(under_way_mutex_);
  tag.seq = ++seq_;
  const uint64_t record = trace_->start(tag);
  trace_->set_algo(record, "peers");
  under_way_.push_back({record, std::move(event)});
}

void PeerRoute::look() {
  const std::lock_guard<std::mutex> lock(under_way_mutex_);
  if (under_way_.empty() || !under_way_.front().done->query()) return;
  bool fine = true;
  try {
    check();
  } catch (const Error&) {
    fine = false;
  }
  for (; !under_way_.empty() && under_way_.front().done->query(); under_way_.pop_front()) {
    trace_->end(under_way_.front().record, fine);
  }
}

bool PeerRoute::can_code(Op op, const CodedArgs& args) const {
  try {
    group_.coded_scratch_bytes(op, args);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void PeerRoute::code(Op op, const CodedArgs& args,
                     const std::function<void(DeviceGroup&, Stream)>& call) {
  const size_t bytes = group_.coded_scratch_bytes(op, args);
  // The scratch is of torch's allocator: its next owner comes later on the same stream.
  const at::Tensor scratch =
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device_));
  Stream stream = this->stream();
  stream.scratch = {static_cast<uint8_t*>(scratch.mutable_data_ptr()), bytes};
  call(group_, stream);
}

PeerRoute::~PeerRoute() {
  trace_->set_look(nullptr);
  const auto wait = [this](Milliseconds limit) {
    const Deadline deadline = Deadline::after(limit);
    for (Backoff backoff; !last_->query() && !deadline.expired();) backoff.wait();
    return last_->query();
  };
  try {
    if (!last_ || wait(Milliseconds(10000))) return;
    group_.abort(plain_notice(
        "rank " + std::to_string(rank()) + " left while operations were under way", group_.rank()));
    wait(Milliseconds(2000));
  } catch (...) {  // the device has failed, and nothing runs there any more
  }
}

Stream PeerRoute::stream() const {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (device_.is_cuda()) return {Device::cuda, native_handle(current, 0)};
  current.synchronize();
  return {};
}

// ------------------------------------------------------------------ operations

void Engine::interrupt_check() {
  check_signals();
  if (const std::exception_ptr error = comm_.over()) std::rethrow_exception(error);
  for (int r = 0; r < comm_.size(); r++) {
    if (r != comm_.rank() && comm_.lost(r))
      throw PeerLost(r, "rank " + std::to_string(r) +
                            " died or left before the ranks had set up the memory that their " +
                            "devices share; look at its own log");
  }
}

std::shared_ptr<PeerRoute> Engine::open_peers(c10::Device device, PeerRoute::Kind kind) {
  constexpr size_t kWord = 96;
  if (device_options_.path != "auto" || comm_.size() == 1) return nullptr;
  const auto exchange = [&](std::string word) {
    word.resize(kWord);
    std::string words(kWord * comm_.size(), 0);
    queue_.run([&] { comm_.exchange_paths(word.data(), words.data(), kWord); });
    for (int r = 0; r < comm_.size(); r++)
      if (words.compare(r * kWord, kWord, word) != 0) return std::string();
    return word.substr(0, word.find('\0'));
  };
  if (exchange(peer_host(device)).empty()) return nullptr;
  std::shared_ptr<PeerRoute> route;
  try {
    const std::string name = kind == PeerRoute::Kind::exact ? "/peers" : "/coded";
    TraceOwner owner = comm_.trace().owner();
    owner.group += name + " on " + c10::Device(device).str();
    route = std::make_shared<PeerRoute>(
        store_, comm_.rank(), comm_.size(), group_ + name, device, kind, comm_.timeout(),
        Trace::make(std::move(owner), trace_size_), [this] { interrupt_check(); });
  } catch (const Error&) {  // the host is one, but its ranks share no memory
  }
  return exchange(route ? "open" : "").empty() ? nullptr : route;
}

std::shared_ptr<PeerRoute> Engine::peers(c10::Device device, PeerRoute::Kind kind) {
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
    const auto route = open_peers(device, kind);
    const std::lock_guard<std::mutex> lock(routes_mutex_);
    peers_[key] = route;
    return route;
  });
}

void Engine::abort_peers(const std::string& reason) noexcept {
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, route] : peers_)
    if (route) route->abort(reason);
}

std::string Engine::describe() {
  std::string text = comm_.describe();
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, route] : peers_) {
    const auto [type, index, kind] = key;
    text += "; on " + c10::Device(type, index).str();
    if (kind == PeerRoute::Kind::coded) text += " with codecs";
    text += " " + (route ? route->describe() : "by way of the host");
  }
  return text;
}

void Engine::set_timeout(Milliseconds timeout) {
  comm_.set_timeout(timeout);
  const std::lock_guard<std::mutex> lock(routes_mutex_);
  for (const auto& [key, route] : peers_)
    if (route) route->set_timeout(timeout);
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
    const bool captured = is_capturing(route->device());
    if (captured && device_options_.blocking_wait)
      throw Error("rank " + std::to_string(comm_.rank()) + ": " + call.name +
                  " cannot be captured in a group with blocking_wait; make the group without it");
    DeviceLane& lane = this->lane(route->device());
    const OpTag tag = issued_tag(call, outputs, comm_.size());
    auto work = make_work<DeviceWork>(false, call, std::move(outputs), lane.deliver_stream(), true,
                                      device_options_.blocking_wait);
    work->set_check([route] { route->check(); });
    work->start();
    lane.begin_delivery();
    lane.keep(used, lane.deliver_stream());
    {
      const c10::StreamGuard on(lane.deliver_stream());
      op(*route);
    }
    work->delivered()->record(lane.deliver_stream());
    // The event of a capture can never be queried, and the trace does not see replays.
    if (!captured) route->set_last(tag, work->delivered());
    work->promise();
    work->complete();
    work->stop();
    report(*work);
    return work;
  });
}

}  // namespace pycomm::torch_binding
