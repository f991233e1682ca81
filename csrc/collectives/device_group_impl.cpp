#include "collectives/device_group_impl.h"

#include <algorithm>

#include "core/reduce.h"
#include "transports/meeting.h"

namespace pycomm {
namespace {

using device::Call;
using device::MoveCall;
using device::ReduceAlgo;
using device::ReduceCall;

static_assert(kMaxDeviceRanks == device::kMaxPeers);

/// Up to so many bytes that a rank reads, one meeting less is worth more than reading less. An
/// estimate, not measured yet.
constexpr size_t kOneShotBytes = size_t{1} << 20;
/// A block is worth its meetings from so many bytes on: each thread moves 32.
constexpr size_t kBlockBytes = size_t{16} << 10;
constexpr size_t kLeastSlot = 4096;
/// Alone on its GPU a rank needs no more to fill its links.
constexpr int kBlocksAlone = 32;
constexpr int kBlocksOfCpu = 4;

}  // namespace

DeviceGroup::Impl::Impl(const Rendezvous& meeting, int index, DeviceGroupOptions options)
    : rank_(meeting.rank),
      size_(meeting.size),
      index_(index),
      options_(std::move(options)),
      workspace_(
          meeting, index,
          {options_.memory, options_.staging_bytes + options_.coded_bytes, options_.first_meeting}),
      slots_(choose_blocks(meeting)),
      slot_bytes_(options_.staging_bytes / 2 / static_cast<size_t>(slots_) / 64 * 64),
      timeout_(options_.timeout.count()) {
  if (slot_bytes_ < kLeastSlot) {
    throw Error("device: " + std::to_string(options_.staging_bytes) + " bytes of staging are " +
                "too few for " + std::to_string(slots_) + " blocks");
  }
}

DeviceGroup::Impl::~Impl() { leave(); }

// Kernels of ranks wait for each other, so all of a GPU's ranks must run at once. A block may fill
// a multiprocessor, and so may those of other kernels, for which a rank may have to wait: a quarter
// of the GPU is left to them.
int DeviceGroup::Impl::choose_blocks(const Rendezvous& meeting) const {
  if (index_ >= 0) {
    const device::Guard guard(index_);
    device::load_kernels();  // by all ranks before they meet here
  }
  int blocks = options_.blocks;
  if (blocks <= 0 && index_ < 0) blocks = kBlocksOfCpu;
  if (blocks <= 0) {
    const int sharers = workspace_.sharers();
    const int room = device::properties(index_).multiprocessors * 3 / 4 / sharers;
    blocks = sharers == 1 ? std::min(room, kBlocksAlone) : room;
  }
  for (const std::string& theirs :
       exchange(meeting, "device/blocks", all_ranks(meeting), std::to_string(blocks))) {
    blocks = std::min(blocks, std::stoi(theirs));
  }
  return std::clamp(blocks, 1, device::kMaxBlocks);
}

int DeviceGroup::Impl::blocks_for(size_t bytes) const {
  return static_cast<int>(std::clamp<size_t>(bytes / kBlockBytes, 1, static_cast<size_t>(slots_)));
}

std::string DeviceGroup::Impl::describe() const {
  return std::to_string(size_) + " ranks: " +
         (index_ < 0             ? "processor, shared memory"
          : workspace_.on_host() ? "host memory"
                                 : "peer access") +
         ", " + std::to_string(slots_) + " blocks";
}

void DeviceGroup::Impl::fail(Op op, const std::string& what) const {
  throw Error("rank " + std::to_string(rank_) + ": " + name(op) + " " + what);
}

void DeviceGroup::Impl::check_dtype(Op op, DType dtype) const {
  if (static_cast<int>(dtype) >= kDTypes) fail(op, "got an unknown dtype");
}

void DeviceGroup::Impl::check_rank(Op op, const char* what, int rank) const {
  if (rank >= 0 && rank < size_) return;
  fail(op, std::string("got ") + what + " " + std::to_string(rank) + " in a group of " +
               std::to_string(size_));
}

Call DeviceGroup::Impl::begin(OpTag tag, Stream stream) {
  if ((stream.device == Device::cuda) != (index_ >= 0)) {
    fail(tag.op, "got a stream of the other kind of device");
  }
  check();
  Call call{};
  call.hash = tag.hash();  // without the number: a graph that is replayed has its old ones
  call.peers = workspace_.pointers();
  call.timeout_ns = static_cast<uint64_t>(timeout_) * 1000000;
  call.slot_bytes = slot_bytes_;
  call.slots = static_cast<uint32_t>(slots_);
  std::lock_guard<std::mutex> lock(mutex_);
  tag.seq = call.seq = ++seq_;
  recent_[tag.seq % recent_.size()] = tag;
  return call;
}

void DeviceGroup::Impl::move(const MoveCall& call, int blocks, Stream stream) {
  const device::Guard guard(index_);
  device::start(call, blocks, stream);
}

void DeviceGroup::Impl::meet(const Call& call, Stream stream) {
  MoveCall nothing{};
  nothing.call = call;
  nothing.runs = 1;
  move(nothing, 1, stream);
}

void DeviceGroup::Impl::reduce(ReduceCall call, const OpTag& tag, double factor, Stream stream) {
  const Lowered lowered = lower(tag.dtype, tag.redop);
  call.op = lowered.op;
  call.factor = tag.redop == ReduceOp::premul_sum ? factor : 1.0;
  call.divisor = size_;
  const device::Guard guard(index_);
  device::start(call, lowered.dtype, blocks_for(call.in.longest()), stream);
}

ReduceAlgo DeviceGroup::Impl::choose(size_t bytes) const {
  const bool one_shot = size_ <= 2 || bytes * static_cast<size_t>(size_) <= kOneShotBytes;
  return one_shot ? ReduceAlgo::one_shot : ReduceAlgo::two_shot;
}

}  // namespace pycomm
