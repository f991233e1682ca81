// Device operations: their streams and copies. A part of _c10d.
#include "binding/torch/device.h"

#include <limits>
#include <map>

#include "binding/torch/backend.h"
#include "core/device.h"

namespace pycomm::torch_binding {
namespace {

struct StreamHolds {
  std::mutex mutex;
  std::map<c10::DeviceType, StreamHold> by_type = {{c10::DeviceType::CUDA, cuda_stream_hold()}};
};

StreamHolds& stream_holds() {
  static StreamHolds holds;
  return holds;
}

at::Tensor pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
}

}  // namespace

StreamHold stream_hold(c10::DeviceType type) {
  auto& holds = stream_holds();
  const std::lock_guard<std::mutex> lock(holds.mutex);
  const auto found = holds.by_type.find(type);
  return found == holds.by_type.end() ? nullptr : found->second;
}

void set_stream_hold(c10::DeviceType type, StreamHold hold) {
  auto& holds = stream_holds();
  const std::lock_guard<std::mutex> lock(holds.mutex);
  holds.by_type[type] = hold;
}

bool is_capturing(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (!device.is_cuda() || !device::built()) return is_capturing(guard, stream, 0);
  return device::is_capturing({Device::cuda, native_handle(stream, 0)});
}

at::Tensor Staging::mirror(const at::Tensor& t, bool reads, bool writes) {
  const bool first = !device_;
  if (!first && *device_ != t.device())
    backend_.arguments().fail(call_, "all tensors must be on one device, got some on " +
                                         device_->str() + " and on " + t.device().str());
  device_ = t.device();
  if (t.is_cpu()) return t;
  if (first && by_ == By::any) peers_ = backend_.peers(t.device());
  if (peers_) return used_.emplace_back(t);
  // This check comes before memory is pinned, which no capture survives.
  if (first && is_capturing(t.device()))
    backend_.arguments().fail(
        call_,
        "passes through host memory, so no graph can capture it; run it outside of the capture");
  Mirror mirror{t, pinned(t.sizes(), t.scalar_type())};
  if (reads) reads_.push_back(mirror);
  if (writes) writes_.push_back(mirror);
  return mirror.host;
}

// ------------------------------------------------------------------ streams

DeviceLane::DeviceLane(c10::Device device)
    : device_(device),
      guard_(device.type()),
      fetch_(guard_.getStreamFromGlobalPool(device)),
      deliver_(guard_.getStreamFromGlobalPool(device)),
      word_(pinned({1}, at::kInt)),
      hold_(stream_hold(device.type())) {
  open(0);
  const c10::StreamGuard on(deliver_);
  // A hold that is open already shows if this device supports any.
  void* stream = native_handle(deliver_, 0);
  if (hold_ && !(stream && hold_(stream, word(), 0))) hold_ = nullptr;
}

DeviceLane::~DeviceLane() {
  try {
    if (!hold_ || guard_.queryStream(deliver_)) return;
  } catch (...) {  // a failed device is treated as one that is not done
  }
  // The stream will still read the word, and nothing waits for it: the memory is left to it.
  new at::Tensor(word_);
}

void DeviceLane::keep(const Tensors& tensors, c10::Stream stream) const {
  for (const at::Tensor& t : tensors)
    if (t.numel()) guard_.recordDataPtrOnStream(t.storage().data_ptr(), stream);
}

void DeviceLane::follow_deliveries() {
  c10::Event queued(device_.type());
  queued.record(deliver_);
  follow(queued);
}

void DeviceLane::begin() {
  c10::Event issued(device_.type());
  issued.record(current());
  issued.block(fetch_);
  issued.block(deliver_);  // queued work may still use the memory that will be written
}

void DeviceLane::begin_delivery() {
  c10::Event issued(device_.type());
  issued.record(current());
  issued.block(deliver_);
}

std::shared_ptr<c10::Event> DeviceLane::fetch(const std::vector<Mirror>& reads) {
  const c10::StreamGuard on(fetch_);
  for (const auto& [device, host] : reads) {
    host.copy_(device, /*non_blocking=*/true);
    keep({device}, fetch_);
  }
  auto fetched = std::make_shared<c10::Event>(device_.type());
  fetched->record(fetch_);
  return fetched;
}

uint32_t DeviceLane::hold() {
  const c10::StreamGuard on(deliver_);
  if (!hold_(native_handle(deliver_, 0), word(), ++holds_))
    throw Error("the stream of " + device_.str() +
                " accepts no more work; look for an earlier error of the device");
  return holds_;
}

void DeviceLane::deliver(const std::vector<Mirror>& writes) {
  const c10::StreamGuard on(deliver_);
  for (const auto& [device, host] : writes) {
    device.copy_(host, /*non_blocking=*/true);
    keep({device}, deliver_);
  }
}

// ------------------------------------------------------------------ operations

namespace {

/// Overwrites the results, so that no caller takes what a failed operation has left for one.
void fill_with_nan(const std::vector<Mirror>& writes) {
  for (const auto& [device, host] : writes)
    if (host.is_floating_point() || host.is_complex())
      host.fill_(std::numeric_limits<double>::quiet_NaN());
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
  // Otherwise CUDA would make this thread, and with it us, a user of the first device, too.
  const c10::DeviceGuard on(device);
  Backoff backoff;
  while (!event.query()) {
    if (aborted_) return;  // the communicator throws the reason
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
  const WithoutGil without_gil;  // another thread may need it before it lets the lock go
  std::unique_lock<std::mutex> lock(device_mutex_);  // streams have the order of the queue
  if (lost_) std::rethrow_exception(lost_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (is_capturing(device))
    throw Error(
        "rank " + std::to_string(comm_.rank()) + ": " + call.name +
        " passes through host memory, so no graph can capture it; run it outside of the capture");
  DeviceLane& lane = this->lane(device);
  // A barrier is for the host. An operation from a callback overtakes others, holds must not.
  const bool held = lane.can_hold() && !device_options_.blocking_wait &&
                    call.type != OpType::BARRIER && !queue_.inside();

  std::vector<const void*> read, written;
  for (const DevicePart& part : parts) {
    add_memory(part.reads, read);
    add_memory(part.writes, written);
  }
  follow_deliveries(read, lane, lock);
  auto work = make_work<DeviceWork>(true, call, std::move(outputs), lane.deliver_stream(), held,
                                    device_options_.blocking_wait);
  const auto delivered = work->delivered();
  lane.begin();
  if (call.type == OpType::BARRIER) lane.follow_deliveries();
  std::vector<std::shared_ptr<c10::Event>> fetched;
  std::vector<uint32_t> holds;
  for (const DevicePart& part : parts) fetched.push_back(lane.fetch(part.reads));
  if (held) {
    for (const DevicePart& part : parts) {
      holds.push_back(lane.hold());
      lane.deliver(part.writes);
    }
    delivered->record(lane.deliver_stream());
    work->promise();
  }
  auto run = [=, engine = this, &lane](Communicator& comm) {
    size_t done = 0;
    try {
      for (; done < parts.size(); done++) {
        engine->await(*fetched[done], call, lane.device());
        parts[done].op(comm);
        held ? lane.open(holds[done]) : lane.deliver(parts[done].writes);
      }
    } catch (...) {
      if (held) {
        for (size_t i = done; i < parts.size(); i++) fill_with_nan(parts[i].writes);
        engine->set_lost(as_python(std::current_exception()));
        lane.open(holds.back());
      }
      throw;
    }
    if (!held) delivered->record(lane.deliver_stream());
  };
  pending_.push_back({written, delivered, c10::weak_intrusive_ptr<DeviceWork>(work)});
  if (queue_.inside()) lock.unlock();  // it runs now, and callbacks of its own may come here
  submit(intrusive_ptr<Work>(work), std::move(run), /*on_device=*/true);
  return work;
}

}  // namespace pycomm::torch_binding
