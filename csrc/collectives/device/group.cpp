#include "collectives/device/group.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "core/reduce.h"
#include "transports/rendezvous.h"

namespace pycomm {

namespace device {
namespace {

std::mutex mutex;

/// Blocks in use, by GPU. It outlives all groups, also those that end with the process.
std::map<int, int>& used() {
  static auto* const used = new std::map<int, int>;
  return *used;
}

}  // namespace

BlockShare::BlockShare(int index, int room, int most) : index_(index) {
  const std::lock_guard<std::mutex> lock(mutex);
  int& in_use = used()[index];
  const int left = room - in_use;
  count_ = std::max(1, std::min(most, in_use == 0 ? left : left / 2));
  in_use += count_;
}

BlockShare::~BlockShare() { shrink(0); }

void BlockShare::shrink(int count) {
  const std::lock_guard<std::mutex> lock(mutex);
  used()[index_] -= count_ - count;
  count_ = count;
}

}  // namespace device

namespace {

using device::ControlPage;
using device::DeviceCall;
using device::KernelError;
using device::MoveCall;
using device::ReduceAlgo;
using device::ReduceCall;
using device::Runs;

Rendezvous rendezvous(std::shared_ptr<Store> store, int rank, int size,
                      const DeviceGroupOptions& options) {
  Rendezvous result =
      make_rendezvous(std::move(store), options.group, rank, size, options.secret, options.timeout);
  result.interrupt_check = options.interrupt_check;
  return result;
}

uint8_t* bytes_of(const void* data) { return static_cast<uint8_t*>(const_cast<void*>(data)); }

/// Makes runs of the parts of the first ranks. Kernels only read what was const.
template <typename T>
Runs runs_of(const BasicParts<T>& parts, int ranks) {
  Runs runs{};
  for (int r = 0; r < ranks; r++) {
    runs.data[r] = bytes_of(parts[r].data);
    runs.bytes[r] = parts[r].size;
  }
  return runs;
}

/// Up to this many bytes that a rank reads, one barrier less is worth more than reading less. An
/// estimate, not measured yet.
constexpr size_t kOneShotBytes = size_t{1} << 20;
/// Bytes from which a block is worth its barriers: each thread moves 32.
constexpr size_t kBlockBytes = size_t{16} << 10;
constexpr size_t kLeastSlot = 4096;
/// Blocks of a rank that is alone on its GPU: it needs no more to fill its links.
constexpr int kBlocksAlone = 32;
constexpr int kBlocksOfCpu = 4;

}  // namespace

DeviceGroup::DeviceGroup(const Rendezvous& rendezvous, int index, DeviceGroupOptions options)
    : rank_(rendezvous.rank),
      size_(rendezvous.size),
      index_(index),
      options_(std::move(options)),
      workspace_(rendezvous, index,
                 {options_.memory, options_.staging_bytes + options_.coded_bytes}),
      slots_(choose_blocks(rendezvous)),
      slot_bytes_(options_.staging_bytes / 2 / static_cast<size_t>(slots_) / 64 * 64),
      timeout_(options_.timeout.count()) {
  if (slot_bytes_ < kLeastSlot) {
    throw Error("device: " + std::to_string(options_.staging_bytes) + " bytes of staging are " +
                "too few for " + std::to_string(slots_) + " blocks; give more staging_bytes");
  }
}

DeviceGroup::DeviceGroup(std::shared_ptr<Store> store, int rank, int size, int index,
                         DeviceGroupOptions options)
    : DeviceGroup(rendezvous(std::move(store), rank, size, options), index, options) {}

DeviceGroup::~DeviceGroup() { leave(); }

// Kernels of ranks wait for each other, so all ranks of a GPU must run at once. A block may fill a
// multiprocessor, and so may blocks of other kernels, for which a rank may have to wait: a quarter
// of the GPU is left to them.
int DeviceGroup::choose_blocks(const Rendezvous& rendezvous) {
  if (index_ >= 0) {
    const device::Guard guard(index_);
    device::load_kernels(options_.coded_bytes > 0);  // on all ranks, before their rendezvous here
  }
  int blocks = options_.blocks;
  if (blocks <= 0 && index_ < 0) blocks = kBlocksOfCpu;
  if (blocks <= 0) {
    const int sharers = workspace_.sharers();
    const int room = device::properties(index_).multiprocessors * 3 / 4 / sharers;
    if (sharers == 1) share_.emplace(index_, room, kBlocksAlone);
    blocks = share_ ? share_->count() : room;
  }
  for (const std::string& theirs : all_gather_values(
           rendezvous, "device/blocks", all_ranks(rendezvous), std::to_string(blocks))) {
    blocks = std::min(blocks, std::max(1, std::atoi(theirs.c_str())));
  }
  if (share_) share_->shrink(blocks);
  return std::clamp(blocks, 1, device::kMaxBlocks);
}

int DeviceGroup::blocks_for(size_t bytes) const {
  return static_cast<int>(std::clamp<size_t>(bytes / kBlockBytes, 1, static_cast<size_t>(slots_)));
}

std::string DeviceGroup::describe() const {
  return std::to_string(size_) + " ranks: " +
         (index_ < 0             ? "processor, shared memory"
          : workspace_.on_host() ? "host memory"
                                 : "peer access") +
         ", " + std::to_string(slots_) + " blocks";
}

DeviceCall DeviceGroup::begin(OpTag tag, Stream stream) {
  if ((stream.device == Device::cuda) != (index_ >= 0)) {
    check(tag.op).fail("got a stream of another kind of device than the group's");
  }
  if (fork_.in_child()) fork_.refuse("rank " + std::to_string(rank_), name(tag.op));
  check();
  DeviceCall call{};
  call.hash = tag.hash();  // without the number: a graph that is replayed has its old ones
  call.peers = workspace_.pointers();
  call.timeout_ns =
      static_cast<uint64_t>(at_most_forever(Milliseconds(timeout_.load())).count()) * 1000000;
  call.slot_bytes = slot_bytes_;
  call.slots = static_cast<uint32_t>(slots_);
  std::lock_guard<std::mutex> lock(mutex_);
  tag.seq = call.seq = ++seq_;
  recent_[tag.seq % recent_.size()] = tag;
  return call;
}

void DeviceGroup::move(const MoveCall& call, int blocks, Stream stream) {
  const device::Guard guard(index_);
  device::start(call, blocks, stream);
}

void DeviceGroup::arrive_wait(const DeviceCall& call, Stream stream) {
  MoveCall nothing{};
  nothing.call = call;
  nothing.runs = 1;
  move(nothing, 1, stream);
}

void DeviceGroup::spoil_if_broken(void* result, size_t bytes, float* found_inf, Stream stream) {
  const device::Guard guard(index_);
  const device::SpoilCall call{workspace_.pointers().progress, static_cast<uint8_t*>(result), bytes,
                               found_inf};
  device::start(call, blocks_for(bytes), stream);
}

void DeviceGroup::reduce(const OpTag& tag, ReduceAlgo algo, const Runs& in, void* out,
                         double factor, Stream stream) {
  OpTag hashed = tag;
  hashed.codec ^= static_cast<uint32_t>(algo);
  const Lowered lowered = lower(tag.dtype, tag.redop);
  ReduceCall call{};
  call.call = begin(hashed, stream);
  call.in = in;
  call.out = bytes_of(out);
  call.algo = algo;
  call.op = lowered.op;
  call.root = tag.root;
  call.divisor = size_;
  call.factor = tag.redop == ReduceOp::premul_sum ? factor : 1.0;
  const device::Guard guard(index_);
  device::start(call, lowered.dtype, blocks_for(call.in.longest()), stream);
}

// One shot sends more bytes with fewer barriers.
ReduceAlgo DeviceGroup::choose(size_t bytes) const {
  const bool one_shot = size_ <= 2 || bytes * static_cast<size_t>(size_) <= kOneShotBytes;
  return one_shot ? ReduceAlgo::one_shot : ReduceAlgo::two_shot;
}

// Failure of a group: what kernels report becomes an exception, and every rank gets the reason.

namespace {

static_assert(device::kNoticeBytes == Notice::kBytes, "a control page holds one notice");

uint32_t load(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

/// Publishes a notice; the first one stays.
void publish(ControlPage& control, const Notice& notice) noexcept {
  uint32_t none = ControlPage::kNone;
  if (!__atomic_compare_exchange_n(&control.abort, &none, ControlPage::kWriting, false,
                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    return;
  }
  notice.encode(control.notice, sizeof control.notice);
  __atomic_store_n(&control.abort, ControlPage::kAborted, __ATOMIC_RELEASE);
}

}  // namespace

std::string DeviceGroup::called(uint64_t seq) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const OpTag& tag = recent_[seq % recent_.size()];
  return tag.seq == seq ? pycomm::describe(tag) : "operation #" + std::to_string(seq);
}

std::exception_ptr DeviceGroup::kernel_error() const {
  const ControlPage& control = workspace_.control(rank_);
  std::vector<int> late;
  KernelError first{};
  for (int r = 0; r < size_; r++) {
    const uint64_t word = load(control.kernel_errors[r]);
    if (word == 0) continue;
    const KernelError one = KernelError::of(word);
    const std::string self = "rank " + std::to_string(rank_) + ": ";
    if (one.kind == KernelError::kMismatch) {
      return std::make_exception_ptr(
          WireMismatch(self + called(one.seq) + " does not match the call of rank " +
                       std::to_string(r) + "; make the same calls in the same order on all ranks"));
    }
    if (late.empty()) first = one;
    late.push_back(r);
  }
  if (late.empty()) return nullptr;
  return std::make_exception_ptr(
      Timeout("rank " + std::to_string(rank_) + ": " + called(first.seq) + " waited " +
                  std::to_string(timeout_) + " ms for " + rank_list(late) + " at its barrier " +
                  std::to_string(first.phase) + "; look at the logs of those ranks",
              late));
}

void DeviceGroup::check() {
  if (fork_.in_child()) fork_.refuse("rank " + std::to_string(rank_), "check");
  failure_.rethrow();
  if (std::exception_ptr error = kernel_error()) {
    failure_.set(error);
    abort(to_notice(error, rank_));
  }
  const ControlPage& control = workspace_.control(rank_);
  if (!failure_.happened() && load(control.abort) == ControlPage::kAborted) {
    failure_.set(from_notice(
        std::make_exception_ptr(Aborted(Notice::decode({control.notice, sizeof control.notice})))));
  }
  failure_.rethrow();
}

void DeviceGroup::abort(const Notice& notice) noexcept {
  if (fork_.in_child()) return;  // the parent's group stays usable
  for (int r = 0; r < size_; r++) publish(workspace_.control(r), notice);
}

void DeviceGroup::lose(int rank) noexcept {
  if (load(workspace_.control(rank).left) != 0 || failure_.happened()) return;
  failure_.set(error_of(lost(rank, "died: its process is gone (seen by rank " +
                                       std::to_string(rank_) + "); look at its own log")));
  abort(to_notice(failure_.error(), rank_));
}

// Peers read our memory until they have ended their last operation. Kernels of a rank that has not
// reported that end by then may still run, or wait for others until their deadline. Memory is not
// freed under them: it is kept until the process ends.
// Host memory is mapped for each process, so peers of other processes do not mind when it is given
// up. But that call waits, with the driver's lock, for the kernels of this process, and one of a
// rank in it may wait for a kernel that another rank cannot start without the lock.
void DeviceGroup::leave() noexcept {
  constexpr Milliseconds kCloseTimeout(2000);
  if (fork_.in_child()) return workspace_.keep();
  __atomic_store_n(&workspace_.control(rank_).left, 1u, __ATOMIC_RELEASE);
  if (workspace_.on_host() && index_ < 0) return;
  const Deadline deadline = Deadline::after(kCloseTimeout);
  for (int r = 0; r < size_; r++) {
    while (load(workspace_.control(r).left) == 0) {
      if (deadline.expired()) return workspace_.keep();
      std::this_thread::sleep_for(Milliseconds(1));
    }
  }
}

// -------------------------------------------------------------------------------- calls

void DeviceGroup::run(const Collective& given, Stream stream, const std::string& algo) {
  const Collective call = given.checked(rank(), size());
  const std::string mismatch = call.own_mismatch(rank());
  if (!mismatch.empty()) check(call.op).fail(mismatch);
  const OpTag tag = call.tag(size());
  if (call.op == Op::barrier) return arrive_wait(begin(tag, stream), stream);
  if (tag.numel == 0 && !sizes_differ(call.op)) return check();
  const int in_runs = call.has_in_parts() ? size() : 1;
  if (call.reduces()) {
    const bool one_shot = algo == "one_shot";
    if (algo != "auto" && !one_shot && algo != "two_shot") {
      check(call.op).fail("has no algorithm \"" + algo +
                          "\" on a GPU; use one of auto, one_shot, two_shot");
    }
    const ReduceAlgo way = call.has_in_parts() ? ReduceAlgo::scatter
                           : algo == "auto"    ? choose(call.bytes(size()))
                           : one_shot          ? ReduceAlgo::one_shot
                                               : ReduceAlgo::two_shot;
    return reduce(tag, way, runs_of(call.in, in_runs), call.out.data(), call.factor, stream);
  }
  const bool at_root = rank_ == call.root;
  MoveCall moved{};
  moved.call = begin(tag, stream);
  moved.runs = in_runs;
  if (call.op != Op::broadcast || at_root) moved.in = runs_of(call.in, in_runs);
  if (call.has_out_parts()) {
    moved.out = runs_of(call.out, size());
  } else if (call.op == Op::scatter || !at_root) {  // one run comes from the root
    moved.out.data[call.root] = call.out[0].data;
    moved.out.bytes[call.root] = call.out[0].size;
  }
  const size_t known =
      sizes_differ(call.op) ? 0 : std::max(moved.in.longest(), moved.out.longest());
  move(moved, known > 0 ? blocks_for(known) : slots_, stream);
}

}  // namespace pycomm
