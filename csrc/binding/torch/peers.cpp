// Peer routes among the accelerators of a host. A part of _c10d.
#include "binding/torch/peers.h"

#include <fstream>

#include "core/device.h"

namespace pycomm::torch_binding {
std::string peer_host(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const bool cuda = device.is_cuda() && device::built() && device.index() < device::count() &&
                    native_handle(guard.getStreamFromGlobalPool(device), 0);
  if (!cuda && !abilities(device.type()).host_addressable) return "";
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
                              std::function<void()> interrupt_check, const std::string& secret) {
  DeviceGroupOptions options;
  options.secret = secret;
  options.group = group;
  options.timeout = timeout;
  options.interrupt_check = std::move(interrupt_check);
  if (kind == PeerRoute::Kind::exact) options.coded_bytes = 0;
  if (kind == PeerRoute::Kind::coded) options.staging_bytes = kStagingOfCoded;
  return options;
}

}  // namespace

PeerRoute::PeerRoute(std::shared_ptr<Store> store, int rank, int size, const std::string& group,
                     c10::Device device, Kind kind, Milliseconds timeout,
                     std::shared_ptr<Trace> trace, std::function<void()> interrupt_check,
                     const std::string& secret)
    : device_(device),
      group_(std::move(store), rank, size, device.is_cuda() ? device.index() : -1,
             options_of(group, kind, timeout, std::move(interrupt_check), secret)),
      trace_(std::move(trace)) {
  trace_->set_look([this] { look(); });
}

void PeerRoute::check() {
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

void PeerRoute::call(const std::function<void(PeerRoute&)>& op, bool captured) {
  const auto set_calling = [&](bool calling) {
    const std::lock_guard<std::mutex> lock(under_way_mutex_);
    calling_ = calling;
    captured_ = captured_ || captured;
  };
  set_calling(true);
  const std::shared_ptr<void> ended(nullptr, [&](void*) { set_calling(false); });
  op(*this);
}

void PeerRoute::lose(int rank) noexcept {
  try {
    stay_on(device_);
    const std::lock_guard<std::mutex> lock(under_way_mutex_);
    const bool waits = !under_way_.empty() && !under_way_.back().done->query();
    if (calling_ || captured_ || waits) group_.lose(rank);
  } catch (...) {  // the device has failed, and nothing runs there any more
  }
}

void PeerRoute::look() {
  const std::lock_guard<std::mutex> lock(under_way_mutex_);
  if (under_way_.empty()) return;
  // The thread may be one that reads the trace.
  const c10::DeviceGuard on(device_);
  const int mode = exchange_capture_mode(device_.type(), kAsksEvents);
  const std::shared_ptr<void> looked(nullptr,
                                     [&](void*) { exchange_capture_mode(device_.type(), mode); });
  if (!under_way_.front().done->query()) return;
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

// Kernels take large parts in rounds: of what one overwrites a later one may have to read.
void PeerRoute::run(const Collective& given, Milliseconds) {
  Collective call = given.checked(rank(), size());
  std::vector<ConstPart> parts;
  std::vector<at::Tensor> copies;
  if (call.overwrites(rank(), size())) {
    const auto bytes = at::TensorOptions(at::kByte).device(device_);
    for (int r = 0; r < (call.has_in_parts() ? size() : 1); r++) {
      const Span<const uint8_t> part = call.in[r];
      auto* data = const_cast<uint8_t*>(part.data);
      const auto length = static_cast<int64_t>(part.size);
      copies.push_back(
          at::for_blob(data, length).options(bytes).target_device(device_).make_tensor().clone());
      parts.push_back({copies.back().const_data_ptr(), call.in.numel(r)});
    }
    call.in = call.has_in_parts() ? ConstParts(parts) : ConstParts(parts[0].data, parts[0].numel);
  }
  group_.run(call, stream());
}

void PeerRoute::run_coded(Op op, const CodedArgs& args, void* out, float* found_inf) {
  const size_t bytes = group_.coded_scratch_bytes(op, args);
  // The scratch is of torch's allocator: its next owner comes later on the same stream.
  const at::Tensor scratch =
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device_));
  Stream stream = this->stream();
  stream.scratch = {static_cast<uint8_t*>(scratch.mutable_data_ptr()), bytes};
  group_.run_coded(op, args, out, stream, found_inf);
}

PeerRoute::~PeerRoute() {
  trace_->set_look(nullptr);
  // No signal ends it: kernels of peers would lose memory under ours.
  const auto wait = [this](Milliseconds limit) {
    const DisposalGuard on(device_);
    const Deadline deadline = Deadline::after(limit);
    while (!last_->query() && !deadline.expired()) std::this_thread::sleep_for(Milliseconds(1));
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

}  // namespace pycomm::torch_binding
