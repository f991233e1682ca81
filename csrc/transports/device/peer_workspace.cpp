#include "transports/device/peer_workspace.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/device.h"
#include "core/sha256.h"
#include "transports/shared_file.h"
#include "transports/shm/region.h"

namespace pycomm {
namespace {

using device::ControlPage;
using device::Flags;
using device::Progress;

constexpr char kReady[] = "device/ready";  // topic of each rank's outcome
/// The unit in which CUDA allocates; memory of this size is not shared with another allocation,
/// whose bytes an exported handle would expose too.
constexpr size_t kWhole = size_t{2} << 20;
/// The number of the first barrier: counts pass 2^32 in every group, and not after hours only.
constexpr uint32_t kFirstBarrier = uint32_t{0} - 20;

std::shared_ptr<void> map(const Fd& file, size_t bytes) {
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0 || static_cast<size_t>(info.st_size) != bytes) {
    throw Error("device: the memory file has another size; give all ranks the same options");
  }
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (base == MAP_FAILED) throw_errno("device: cannot map a memory file");
  keep_out_of_dumps(base, bytes);
  return {base, [bytes](void* memory) { ::munmap(memory, bytes); }};
}

/// Shares the file: rank 0 makes it and passes it to all others.
std::shared_ptr<void> share_memory(const Rendezvous& rendezvous, size_t bytes) {
  std::shared_ptr<void> base;
  Fd file;
  const auto take = [&](const Fd& theirs) { base = map(theirs, bytes); };
  const auto make = [&] {
    file = make_memory_file("device", bytes);
    take(file);
    return file.get();
  };
  share_file(rendezvous, all_ranks(rendezvous), {"device", "device/file", kReady}, nullptr, make,
             take);
  return base;
}

void check(int ranks, int index, const PeerWorkspace::Options& options) {
  if (ranks > device::kMaxPeers) {
    throw Error("device: the group has " + std::to_string(ranks) + " ranks, but at most " +
                std::to_string(device::kMaxPeers) +
                " can share device memory; make smaller groups");
  }
  if (options.memory != "auto" && options.memory != "device" && options.memory != "host") {
    throw Error("device: no memory is called \"" + options.memory +
                "\": want auto, device or host");
  }
  if (index < 0 && options.memory == "device") {
    throw Error("device: ranks of the CPU have no memory of a GPU to share; use memory=\"host\"");
  }
}

/// Publishes our outcome, and returns what went wrong on which rank, or "".
std::string agree(const Rendezvous& rendezvous, const std::string& topic, const std::string& ours) {
  const std::vector<std::string> words =
      all_gather_values(rendezvous, topic, all_ranks(rendezvous), ours);
  for (size_t r = 0; r < words.size(); r++) {
    if (words[r] != kYes) return "rank " + std::to_string(r) + ": " + words[r];
  }
  return "";
}

}  // namespace

/// The value that a rank publishes about itself.
struct PeerWorkspace::RankInfo {
  Digest host;          ///< of its host and user
  uint64_t process[2];  ///< names the process on its host
  uint64_t bytes;
  uint64_t shown;  ///< address of its data in memory of its GPU, or 0
  int32_t index;   ///< its GPU, in its process
  char gpu[16];
  char memory[4];
  uint32_t exported;
  char ipc_handle[64];  ///< IPC handle for other processes
};

PeerWorkspace::PeerWorkspace(const Rendezvous& rendezvous, int index, const Options& options)
    : bytes_(round_up(options.bytes, page_size())) {
  check(rendezvous.size, index, options);
  const RankInfo ours = own_info(index, options);
  const std::vector<RankInfo> infos = exchange_info(rendezvous, ours);
  for (const RankInfo& one : infos) {
    const auto shared = std::count_if(infos.begin(), infos.end(), [&](const RankInfo& other) {
      return std::memcmp(one.gpu, other.gpu, sizeof one.gpu) == 0;
    });
    sharers_ = std::max(sharers_, static_cast<int>(shared));
  }
  pointers_.rank = rendezvous.rank;
  pointers_.ranks = rendezvous.size;

  if (index >= 0 && options.memory != "host") {
    const std::string problem = agree(rendezvous, "device/peers", try_devices(infos, index));
    on_host_ = !problem.empty();
    if (on_host_) {
      opened_.clear();
      agree(rendezvous, "device/closed", kYes);  // none is freed that another process has open
      shown_.reset();
    }
    if (on_host_ && options.memory == "device") throw Error("device: " + problem);
  }
  const std::string problem =
      agree(rendezvous, kReady, outcome_of([&] {
              file_ = share_memory(rendezvous, region() * static_cast<size_t>(rendezvous.size));
              if (on_host_) {
                use_host(index);
              } else {
                control_ = device::map_host(&control(rendezvous.rank), sizeof(ControlPage));
              }
              start_counting(index);
            }));
  if (!problem.empty()) throw Error("device: " + problem);
}

PeerWorkspace::RankInfo PeerWorkspace::own_info(int index, const Options& options) {
  RankInfo ours{};
  struct stat space = {};
  ::stat("/proc/self/ns/pid", &space);
  ours.host = sha256(host_id() + "/" + std::to_string(::geteuid()));
  ours.process[0] = static_cast<uint64_t>(::getpid());
  ours.process[1] = space.st_ino;
  ours.bytes = bytes_;
  ours.index = index;
  options.memory.copy(ours.memory, sizeof ours.memory);  // the first letters are enough
  if (index < 0) return ours;
  device::properties(index).uuid.copy(ours.gpu, sizeof ours.gpu);
  if (options.memory == "host") return ours;
  outcome_of([&] {  // peers will see what is missing
    shown_ = device::allocate(index, round_up(sizeof(Flags) + bytes_, kWhole));
    ours.shown = reinterpret_cast<uint64_t>(shown_.get());
    device::export_memory(shown_.get()).copy(ours.ipc_handle, sizeof ours.ipc_handle);
    ours.exported = 1;
  });
  return ours;
}

std::vector<PeerWorkspace::RankInfo> PeerWorkspace::exchange_info(const Rendezvous& rendezvous,
                                                                  const RankInfo& ours) {
  const std::string text(reinterpret_cast<const char*>(&ours), sizeof ours);
  std::vector<RankInfo> words;
  for (const std::string& theirs :
       all_gather_values(rendezvous, "device/word", all_ranks(rendezvous), text)) {
    const std::string who = "device: rank " + std::to_string(words.size());
    if (theirs.size() != sizeof ours)
      throw Error(who + " runs another version of pycomm; install the same on all ranks");
    RankInfo info;
    std::memcpy(&info, theirs.data(), sizeof info);
    if (info.host != ours.host) {
      throw Error(who + " is not on the host of rank " + std::to_string(rendezvous.rank) +
                  "; a device group needs all ranks on one host");
    }
    if (info.bytes != ours.bytes ||
        std::memcmp(info.memory, ours.memory, sizeof ours.memory) != 0 ||
        (info.index < 0) != (ours.index < 0)) {
      throw WireMismatch(who + " has other options than rank " + std::to_string(rendezvous.rank) +
                         "; start all ranks with the same options");
    }
    words.push_back(info);
  }
  return words;
}

/// Regions are whole pages, since a host exposes to its device only the pages of its own control
/// page.
size_t PeerWorkspace::region() const {
  return round_up(sizeof(ControlPage) + sizeof(Flags) + bytes_, page_size());
}

ControlPage& PeerWorkspace::control(int rank) const {
  return *reinterpret_cast<ControlPage*>(static_cast<uint8_t*>(file_.get()) + rank * region());
}

void PeerWorkspace::keep() noexcept {
  if (shown_) static_cast<void>(new (std::nothrow) std::shared_ptr<void>(shown_));
}

std::string PeerWorkspace::try_devices(const std::vector<RankInfo>& infos, int index) {
  const RankInfo& ours = infos[pointers_.rank];
  return outcome_of([&] {
    for (int r = 0; r < pointers_.ranks; r++) {
      const RankInfo& info = infos[r];
      if (info.shown == 0)
        throw Error("rank " + std::to_string(r) + " shares no memory of its GPU");
      auto* shown = reinterpret_cast<uint8_t*>(info.shown);
      if (std::memcmp(info.process, ours.process, sizeof ours.process) == 0) {
        if (!device::reaches(index, info.index)) {
          throw Error("there is no peer access to the GPU of rank " + std::to_string(r));
        }
        device::connect(index, info.index);
      } else {
        if (!info.exported) throw Error("rank " + std::to_string(r) + " cannot export its memory");
        opened_.push_back(
            device::import_memory(index, std::string(info.ipc_handle, sizeof info.ipc_handle)));
        shown = static_cast<uint8_t*>(opened_.back().get());
      }
      pointers_.flags[r] = reinterpret_cast<Flags*>(shown);
      pointers_.data[r] = shown + sizeof(Flags);
    }
  });
}

void PeerWorkspace::use_host(int index) {
  auto* base = static_cast<uint8_t*>(file_.get());
  if (index >= 0) {
    mapped_ = device::map_host(base, region() * pointers_.ranks);
    base = static_cast<uint8_t*>(mapped_.get());
  }
  for (int r = 0; r < pointers_.ranks; r++) {
    uint8_t* const part = base + r * region();
    pointers_.flags[r] = reinterpret_cast<Flags*>(part + sizeof(ControlPage));
    pointers_.data[r] = part + sizeof(ControlPage) + sizeof(Flags);
  }
  control_ = {mapped_, base + pointers_.rank * region()};
}

void PeerWorkspace::start_counting(int index) {
  const auto flags = std::make_unique<Flags>();
  for (auto& block : flags->arrived) std::fill(std::begin(block), std::end(block), kFirstBarrier);
  Progress progress{};
  std::fill(std::begin(progress.barriers), std::end(progress.barriers), kFirstBarrier);

  if (index >= 0) {
    progress_ = device::allocate(index, sizeof progress);
  } else {
    progress_ = std::make_shared<Progress>();
  }
  const device::Guard guard(index);
  const std::shared_ptr<void> own = index >= 0 ? device::make_stream(index) : nullptr;
  const Stream stream{index >= 0 ? Device::cuda : Device::cpu, own.get()};
  device::copy(progress_.get(), &progress, sizeof progress, stream);
  device::copy(pointers_.flags[pointers_.rank], flags.get(), sizeof *flags, stream);
  device::synchronize(stream);
  pointers_.progress = static_cast<Progress*>(progress_.get());
  pointers_.control = static_cast<ControlPage*>(control_.get());
}

}  // namespace pycomm
