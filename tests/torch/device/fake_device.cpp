// Simulated accelerator for tests, made of threads: "fakegpu", torch's PrivateUse1. Streams run
// queued work later, in order and after random pauses; memory is poisoned as soon as no announced
// use of it is left. So an operation that does not wait for an event, or does not announce the
// stream on which it uses memory, produces wrong values, as on a GPU, but every time. Calls that
// queue work take the driver's lock, and a copy to or from memory that is not pinned keeps it until
// the copy is done, as seen with CUDA: a thread that must go on to end what the copy waits for must
// not call the driver.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/logical_xor.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

using namespace std::chrono_literals;
constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2, kStreams = 9;  // stream 0 is the default, the others are the pool
constexpr int kPoison = 0xEE;

// ------------------------------------------------------------------ recording

/// What is asked of the device, as recorded.py reads it.
enum Asked : int64_t { kOperation, kWork, kCopy, kRecord, kBlock, kWaitStream, kWaitEvent };

/// Whether any thread records, or wants results soon: streams then take work without pauses.
std::atomic<bool> recording{false}, hurried{false};
thread_local bool recorded = false;       // this thread's calls
thread_local std::vector<int64_t> notes;  // kind, stream and value of each
thread_local int within = 0;              // operations that are made of others

void note(int64_t kind, int64_t stream, int64_t value) {
  if (recorded && within == 0) notes.insert(notes.end(), {kind, stream, value});
}

struct Within {
  Within() { within++; }
  ~Within() { within--; }
};

// ------------------------------------------------------------------ streams and events

/// A point in a stream. Set when the stream has reached it.
struct Mark {
  static inline std::atomic<int64_t> next{0};
  const int64_t number = next++;
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  std::chrono::steady_clock::time_point at;  // when it was reached last

  void set() {
    const std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    at = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  bool is_set() {
    const std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
};
using MarkPtr = std::shared_ptr<Mark>;

using Task = std::function<void()>;

class Worker;
void note_in_capture(Worker* stream, const Task& task);

class Worker {
 public:
  void queue(Task task) {
    note_in_capture(this, task);
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!started_) std::thread([this] { serve(); }).detach();
    started_ = true;
    changed_.notify_all();
  }
  MarkPtr mark() {
    auto mark = std::make_shared<Mark>();
    queue([mark] { mark->set(); });
    return mark;
  }

 private:
  void serve() {
    std::mt19937 random(std::random_device{}());
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!recording && !hurried)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool started_ = false;
};

/// Never destroyed: threads may run until the process ends.
Worker& worker(c10::Stream s) {
  static auto& workers = *new std::array<std::array<Worker, kStreams>, kDevices>;
  return workers.at(s.device_index()).at(s.id());
}

thread_local c10::DeviceIndex current_device = 0;

// Devices on which this process has a context, which costs hundreds of MB of a GPU. As with CUDA,
// a thread makes one when it sets another device, and for what it asks of a device. As in torch,
// a guard goes back to a device without a context only by name: the driver does not hear of it.
std::array<std::atomic<bool>, kDevices> contexts{};
thread_local c10::DeviceIndex device_of_driver = 0;

void use_driver() { contexts.at(device_of_driver) = true; }
void set_device(c10::DeviceIndex d) {
  current_device = d;
  if (d == std::exchange(device_of_driver, d)) return;
  use_driver();
}
void return_to_device(c10::DeviceIndex d) {
  if (contexts.at(d)) return set_device(d);
  current_device = d;
}
/// What torch does for calls that need the device of their stream: it returns to any device.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex d) : before_(current_device) {
    set_device(d);
    use_driver();
  }
  ~OnDevice() { set_device(before_); }

 private:
  const c10::DeviceIndex before_;
};
/// Returns the devices with contexts, a bit for each; and forgets them, and which this thread uses.
int64_t made_contexts(bool forget) {
  int64_t made = 0;
  for (int d = 0; d < kDevices; d++) made |= int64_t{contexts.at(d)} << d;
  for (int d = 0; forget && d < kDevices; d++) contexts.at(d) = false;
  if (forget) current_device = device_of_driver = 0;
  return made;
}
thread_local std::array<c10::StreamId, kDevices> current_streams{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), id);
}
c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, current_streams.at(device));
}

/// What this thread may ask while any thread captures: as CUDA's modes, of which 0 allows nothing.
thread_local int capture_mode = 0;
int exchange_capture_mode(int* mode) {
  std::swap(capture_mode, *mode);
  return 0;
}

/// A simulated graph capture, starting at an origin stream. Captured work still runs; operations
/// that are not permitted during a capture are refused, and unjoined streams are detected.
class Capture {
 public:
  void begin(c10::Stream origin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_ = {origin};
    events_.clear();
    joined_.clear();
    tasks_.clear();
    lost_ = false;
  }
  /// Something has run that is not in the graph.
  void lose() {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_ = lost_ || !streams_.empty();
  }
  bool lost() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lost_;
  }
  /// Returns what was queued. Throws if the origin does not wait for all captured streams.
  std::vector<Task> end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto streams = std::exchange(streams_, {});
    for (size_t i = 1; i < streams.size(); i++)
      TORCH_CHECK(joined_.count(streams[i].id()), "capture: stream ", streams[i].id(),
                  " was not joined");
    return std::exchange(tasks_, {});
  }
  bool under_way() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !streams_.empty();
  }
  void note(Worker* stream, const Task& task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const c10::Stream& each : streams_)
      if (&worker(each) == stream) tasks_.push_back(task);
  }
  bool has(c10::Stream s) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::find(streams_.begin(), streams_.end(), s) != streams_.end();
  }
  void refuse(const char* what) {
    if (capture_mode == 2) return;  // relaxed
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(streams_.empty(), "capture: nobody may ", what);
  }
  void record(void* event, c10::Stream s) {
    if (!has(s)) return forget(event);
    const std::lock_guard<std::mutex> lock(mutex_);
    events_[event] = s.id();
  }
  void block(void* event, c10::Stream s) {
    const bool captured = has(s);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = events_.find(event);
    if (found == events_.end()) return;
    if (!captured) streams_.push_back(s);
    if (s == streams_.front()) joined_.insert(found->second);
  }
  void forget(void* event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.erase(event);
  }

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> streams_;       // the first is the origin
  std::map<void*, c10::StreamId> events_;  // recorded in the capture
  std::set<c10::StreamId> joined_;
  std::vector<Task> tasks_;
  bool lost_ = false;
};

Capture& capture() {
  static auto& capture = *new Capture;
  return capture;
}

void note_in_capture(Worker* stream, const Task& task) { capture().note(stream, task); }

/// The driver's lock. It is held during every call that queues work.
std::mutex& driver() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

// ------------------------------------------------------------------ memory

/// Device memory or pinned memory. A freed block is poisoned when all announced uses are over, and
/// never reused, so that late readers get poison instead of another tensor.
class Memory {
 public:
  static Memory& instance() {
    static auto& memory = *new Memory;
    return memory;
  }
  void* allocate(size_t bytes, bool pinned) {
    auto* data = static_cast<uint8_t*>(std::malloc(bytes + 1));
    std::memset(data, kPoison, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[data] = {bytes, pinned, {current_stream(current_device)}};
    used_ += pinned ? 0 : bytes;
    most_ = std::max(most_, used_);
    return data;
  }
  /// Returns the most bytes of devices that were allocated since the last call with `reset`.
  size_t most(bool reset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reset) most_ = used_;
    return most_;
  }
  /// Announces that work queued on `stream` until the block of `data` is freed uses that block.
  void announce(const void* data, c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Block* block = find(data)) block->users.push_back(stream);
  }
  bool is_pinned(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Block* block = find(data);
    return block && block->pinned;
  }
  void free(void* data) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = blocks_.find(static_cast<uint8_t*>(data));
    const Block block = found->second;
    blocks_.erase(found);
    used_ -= block.pinned ? 0 : block.bytes;
    lock.unlock();
    if (capture().under_way()) return;  // the graph keeps it
    auto marks = std::make_shared<std::vector<MarkPtr>>();
    if (block.users.size() > 1) {  // torch's allocators record events then
      const std::lock_guard<std::mutex> call(driver());
    }
    // Pinned memory is freed at once by a host thread, device memory in stream order.
    for (size_t i = block.pinned ? 1 : 0; i < block.users.size(); i++)
      marks->push_back(worker(block.users[i]).mark());
    std::thread([marks, data, bytes = block.bytes] {
      for (const auto& mark : *marks) mark->wait();
      if (recording) return std::free(data);  // it is poisoned when it is allocated again
      std::memset(data, kPoison, bytes);
    }).detach();
  }

 private:
  struct Block {
    size_t bytes = 0;
    bool pinned = false;
    std::vector<c10::Stream> users;  // the first is the one on which it was allocated
  };
  Block* find(const void* data) {
    auto after = blocks_.upper_bound(const_cast<uint8_t*>(static_cast<const uint8_t*>(data)));
    if (after == blocks_.begin()) return nullptr;
    auto& [start, block] = *--after;
    return data <= start + block.bytes ? &block : nullptr;
  }
  std::mutex mutex_;
  std::map<uint8_t*, Block> blocks_;
  size_t used_ = 0, most_ = 0;
};

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(bool pinned) : pinned_(pinned) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (pinned_) capture().refuse("allocate pinned memory");
    void* data = Memory::instance().allocate(bytes, pinned_);
    const c10::Device device =
        pinned_ ? c10::Device(c10::kCPU) : c10::Device(kFake, current_device);
    return {data, data, [](void* held) { Memory::instance().free(held); }, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  const bool pinned_;
};
Allocator device_memory(false), pinned_memory(true);

// ------------------------------------------------------------------ torch's device interface

/// Streams of high priority that were asked for.
std::atomic<int64_t> prioritized{0};
/// Milliseconds by which streams reach events later.
std::atomic<int64_t> event_delay{0};
void delay_events(int64_t milliseconds) { event_delay = milliseconds; }
/// Number of events until they are refused; below 0: never.
std::atomic<int64_t> records_left{-1};
void refuse_events_after(int64_t count) { records_left = count; }
/// Copies keep their caller until they are done, as where the driver has room for no more of them.
std::atomic<bool> full{false};
void keep_callers(bool on) { full = on; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::DeviceIndex before = current_device;
    set_device(d.index());
    return {kFake, before};
  }
  c10::Device getDevice() const override { return {kFake, current_device}; }
  void setDevice(c10::Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { return_to_device(d.index()); }
  c10::Stream getStream(c10::Device d) const override {
    return current_stream(d.has_index() ? d.index() : current_device);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(d.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    if (high) prioritized++;
    static std::atomic<int> next{0};
    return stream_of(d.has_index() ? d.index() : current_device, 1 + next++ % (kStreams - 1));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return getStreamFromGlobalPool(d, false);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return stream_of(s.device_index(), std::exchange(current_streams.at(s.device_index()), s.id()));
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &worker(s); }
  // Torch 2.11 does not call this.
  bool isStreamCapturing(const c10::Stream& s) const { return capture().has(s); }
  bool queryStream(const c10::Stream& s) const override {
    auto mark = worker(s).mark();
    std::this_thread::sleep_for(2ms);
    return mark->is_set();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    note(kWaitStream, s.id(), 0);
    worker(s).mark()->wait();
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    for (int id = 0; id < kStreams; id++) worker(stream_of(d, id)).mark()->wait();
  }

  void destroyEvent(void* event, const c10::DeviceIndex d) const noexcept override {
    if (!event) return;
    const std::lock_guard<std::mutex> call(driver());
    const OnDevice on(d);
    capture().forget(event);
    delete static_cast<MarkPtr*>(event);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    TORCH_CHECK(records_left != 0, "the device has failed");
    if (records_left > 0) records_left--;
    const std::lock_guard<std::mutex> call(driver());
    const OnDevice on(s.device_index());
    if (!*event) *event = new MarkPtr;
    if (event_delay > 0) {
      worker(s).queue([] { std::this_thread::sleep_for(std::chrono::milliseconds(event_delay)); });
    }
    *static_cast<MarkPtr*>(*event) = worker(s).mark();
    note(kRecord, s.id(), (*static_cast<MarkPtr*>(*event))->number);
    capture().record(*event, s);
  }
  void block(void* event, const c10::Stream& s) const override {
    const std::lock_guard<std::mutex> call(driver());
    const OnDevice on(s.device_index());
    note(kBlock, s.id(), (*static_cast<MarkPtr*>(event))->number);
    worker(s).queue([mark = *static_cast<MarkPtr*>(event)] { mark->wait(); });
    capture().block(event, s);
  }
  bool queryEvent(void* event) const override {
    capture().refuse("ask an event");
    if (event) use_driver();
    return !event || (*static_cast<MarkPtr*>(event))->is_set();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    std::chrono::steady_clock::time_point at[2];
    for (int i = 0; i < 2; i++) {
      const MarkPtr& mark = *static_cast<MarkPtr*>(i == 0 ? begin : end);
      TORCH_CHECK(mark->is_set(), "elapsed time: the device has not reached both events");
      at[i] = mark->at;
    }
    return std::chrono::duration<double, std::milli>(at[1] - at[0]).count();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    note(kWaitEvent, 0, (*static_cast<MarkPtr*>(event))->number);
    (*static_cast<MarkPtr*>(event))->wait();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    Memory::instance().announce(data.get(), s);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice({kFake, d}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    const c10::DeviceIndex before = current_device;
    return_to_device(d);
    return before;
  }
  bool isPinnedPtr(const void* data) const override { return Memory::instance().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// ------------------------------------------------------------------ operators

/// The operations that queue nothing: views and memory.
template <auto f>
struct Noted;
template <typename R, typename... A, R (*f)(A...)>
struct Noted<f> {
  static R call(A... args) {
    note(kOperation, 0, 0);
    return f(std::forward<A>(args)...);
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard on(device && device->has_index() ? *device
                                                          : c10::Device(kFake, current_device));
  return at::detail::empty_generic(size, &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(c10::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(device && device->has_index() ? *device
                                                          : c10::Device(kFake, current_device));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(c10::kFloat));
}

/// Returns a tensor's memory as a CPU tensor that does not keep it alive.
at::Tensor view_of(const at::Tensor& t) {
  return at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), [](void*) {},
      at::TensorOptions(t.scalar_type()).device(c10::kCPU), c10::Device(c10::kCPU));
}

/// Queues the copy, unless a side is on the host and must not or cannot wait, as torch on CUDA.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const c10::Device device = from.is_cpu() ? to.device() : from.device();
  const c10::Stream stream = current_stream(device.index());
  const bool inside = !from.is_cpu() && !to.is_cpu();
  const auto bytes = static_cast<int64_t>(to.nbytes());
  note(inside ? kWork : kCopy, stream.id(), inside ? 2 * bytes : bytes);
  const at::Tensor source = from.is_conj() || from.is_neg() ? view_of(from).clone() : view_of(from);
  const std::lock_guard<std::mutex> call(driver());
  worker(stream).queue([source, target = view_of(to)] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  });
  bool queued = !full;
  for (const at::Tensor& side : {from, to}) {
    if (!side.is_cpu()) continue;
    if (Memory::instance().is_pinned(side.data_ptr())) {
      Memory::instance().announce(side.data_ptr(), stream);
      queued = queued && non_blocking;
    } else {
      queued = false;
    }
  }
  if (!queued) {
    capture().lose();
    note(kWaitStream, stream.id(), 0);
    worker(stream).mark()->wait();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  note(kWork, current_stream(self.device().index()).id(), static_cast<int64_t>(self.nbytes()));
  worker(current_stream(self.device().index())).queue([target = view_of(self), value] {
    target.fill_(value);
  });
  return self;
}

at::Tensor& logical_xor_out(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  const c10::Stream stream = current_stream(out.device().index());
  note(kWork, stream.id(), static_cast<int64_t>(a.nbytes() + b.nbytes() + out.nbytes()));
  worker(stream).queue([a = view_of(a), b = view_of(b), out = view_of(out)]() mutable {
    at::logical_xor_out(out, a, b);
  });
  return out;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  capture().lose();
  const int64_t stream = current_stream(current_device).id();
  if (op.schema().name() == "aten::_local_scalar_dense") {
    note(kCopy, stream, 4);
    note(kWaitStream, stream, 0);
  } else {
    int64_t bytes = 0;
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
      if (value.isTensor() && value.toTensor().defined()) bytes += value.toTensor().nbytes();
    note(kWork, stream, bytes);
  }
  const Within whole;
  at::native::cpu_fallback(op, stack);
}

void record_calls(bool on) {
  recording = recorded = on;
  notes.clear();
}
std::vector<int64_t> recorded_calls() { return notes; }
void hurry() { hurried = true; }
/// Notes what Python does, on the current stream.
void note_call(int64_t kind, int64_t value) {
  note(kind, current_stream(current_device).id(), value);
}

/// Keeps the stream busy for this time.
void busy(int64_t milliseconds) {
  worker(current_stream(current_device)).queue([milliseconds] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
}

/// Queues a kernel that g++ has compiled: `run` is the function of tests/codecs/cuda/emulated.h.
void launch(int64_t run, const std::string& kernel, int64_t blocks, const at::Tensor& argument) {
  using Run = int (*)(const char*, unsigned, const void*, size_t);
  const std::lock_guard<std::mutex> call(driver());
  worker(current_stream(current_device)).queue([=, argument = argument.clone()] {
    static std::mutex one_at_a_time;  // the emulated threads are global variables
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    const int wrong = reinterpret_cast<Run>(run)(kernel.c_str(), static_cast<unsigned>(blocks),
                                                 argument.data_ptr(), argument.numel());
    if (wrong != 0) std::abort();
  });
}

/// Waits for all queued work first, as torch does for CUDA.
void begin_capture() {
  Guard().synchronizeDevice(current_device);
  capture().begin(current_stream(current_device));
}
std::vector<std::vector<Task>>& graphs() {
  static auto& graphs = *new std::vector<std::vector<Task>>;
  return graphs;
}
/// Returns the number of the graph; -1 if it lacks something that this device runs on the host.
int64_t end_capture() {
  graphs().push_back(capture().end());
  if (capture().lost()) return -1;
  return static_cast<int64_t>(graphs().size()) - 1;
}
bool is_capturing() { return capture().has(current_stream(current_device)); }
/// Queues a graph's work once more, in the order in which it was captured.
void replay(int64_t graph) {
  const std::lock_guard<std::mutex> call(driver());
  for (const Task& task : graphs().at(graph)) worker(current_stream(current_device)).queue(task);
}
int64_t most_bytes(bool reset) { return static_cast<int64_t>(Memory::instance().most(reset)); }

/// Number of holds until they are refused; below 0: never.
std::atomic<int64_t> holds_left{-1};
void refuse_holds_after(int64_t count) { holds_left = count; }
bool hold(void* stream, const uint32_t* word, uint32_t value) {
  if (holds_left == 0) return false;
  if (holds_left > 0) holds_left--;
  static_cast<Worker*>(stream)->queue([word, value] {
    while (static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
      std::this_thread::sleep_for(50us);
  });
  return true;
}
int64_t hold_address() { return reinterpret_cast<int64_t>(&hold); }
int64_t capture_mode_address() { return reinterpret_cast<int64_t>(&exchange_capture_mode); }

}  // namespace

/// Waits for the current stream, by a thread that may have the GIL. Returns 0 if that takes longer.
extern "C" int fake_device_synchronize(int milliseconds) {
  const auto mark = worker(current_stream(current_device)).mark();
  for (int waited = 0; waited < milliseconds && !mark->is_set(); waited++)
    std::this_thread::sleep_for(1ms);
  return mark->is_set();
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &Noted<&empty>::call);
  m.impl("empty_strided", &Noted<&empty_strided>::call);
  m.impl("as_strided", &Noted<&at::native::as_strided_tensorimpl>::call);
  m.impl("view", &Noted<&at::native::view>::call);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("fill_.Scalar", &fill);
  m.impl("logical_xor.out", &logical_xor_out);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY(fakegpu, m) {
  m.def("busy(int milliseconds) -> ()", &busy);
  m.def("launch(int run, str kernel, int blocks, Tensor argument) -> ()", &launch);
  m.def("hold_address() -> int", &hold_address);
  m.def("capture_mode_address() -> int", &capture_mode_address);
  m.def("refuse_holds_after(int count) -> ()", &refuse_holds_after);
  m.def("refuse_events_after(int count) -> ()", &refuse_events_after);
  m.def("delay_events(int milliseconds) -> ()", &delay_events);
  m.def("keep_callers(bool on) -> ()", &keep_callers);
  m.def("record_calls(bool on) -> ()", &record_calls);
  m.def("recorded_calls() -> int[]", &recorded_calls);
  m.def("hurry() -> ()", &hurry);
  m.def("note(int kind, int value) -> ()", &note_call);
  m.def("begin_capture() -> ()", &begin_capture);
  m.def("is_capturing() -> bool", &is_capturing);
  m.def("prioritized() -> int", [] { return prioritized.load(); });
  m.def("end_capture() -> int", &end_capture);
  m.def("replay(int graph) -> ()", &replay);
  m.def("most_bytes(bool reset) -> int", &most_bytes);
  m.def("made_contexts(bool forget) -> int", &made_contexts);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {  // nothing is computed in another dtype
  m.fallback(torch::CppFunction::makeFallthrough());
}
