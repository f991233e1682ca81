// Shm transport: ranks are processes of one host, or threads, and the shared region is a memory
// file of the lowest of them.
//
// sharers_id() tells which ranks are candidates, and trying tells which are members: a rank that
// cannot receive or map the file publishes that in the store, and the others go on without it.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "core/warning.h"
#include "transports/shared_file.h"
#include "transports/shm/cma.h"
#include "transports/shm/transport.h"

namespace pycomm {
namespace {

constexpr char kName[] = "shm/name";  ///< name of the socket that passes on the region
constexpr char kOutcomes[] = "shm/outcome";

/// Returns the largest file that this process may make: `ulimit -f`, which also limits memory
/// files.
size_t largest_file() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return static_cast<size_t>(limit.rlim_cur);
}

/// Makes the file, with heaps if a file may be so large.
Fd make_region_file(int ranks) {
  size_t bytes = SharedRegion::bytes_with_heaps(ranks);
  // Exceeding the limit would raise a signal that ends the process.
  if (bytes > largest_file()) bytes = SharedRegion::bytes(ranks);
  if (bytes > largest_file()) {
    throw Error("shm: the limit of file sizes (ulimit -f) is " + std::to_string(largest_file()) +
                " bytes, but shared memory needs " + std::to_string(bytes) + "; raise the limit");
  }
  return make_memory_file("shm", bytes);
}

/// Maps the file, with the heaps if there is address space for them.
std::shared_ptr<void> map_region(Fd file, int ranks, bool& heaps) {
  size_t bytes = SharedRegion::bytes_with_heaps(ranks);
  struct stat info = {};
  const bool known = ::fstat(file.get(), &info) == 0;
  const auto size = static_cast<size_t>(info.st_size);
  if (!known || (size != bytes && size != SharedRegion::bytes(ranks))) {
    throw Error("shm: the shared memory has another size; install the same pycomm on all ranks");
  }
  const auto map = [&] {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(),
                  0);
  };
  void* base = size == bytes ? map() : MAP_FAILED;
  heaps = base != MAP_FAILED;
  if (!heaps) {
    bytes = SharedRegion::bytes(ranks);
    base = map();
  }
  if (base == MAP_FAILED) throw_errno("shm: cannot map the shared memory");
  keep_out_of_dumps(base, bytes);
  const int fd = file.release();
  return {base, [bytes, fd, device = info.st_dev, inode = info.st_ino](void* memory) {
            ::munmap(memory, bytes);
            // Other code may have closed the descriptor, and its number may be another file's now.
            struct stat now = {};
            if (::fstat(fd, &now) == 0 && now.st_dev == device && now.st_ino == inode) ::close(fd);
          }};
}

/// Maps the region and takes our place in it.
SharedMemory join(const Rendezvous& rendezvous, const std::vector<int>& candidates, Fd file) {
  SharedMemory memory;
  memory.members = candidates;
  memory.rank = rendezvous.rank;
  memory.file = file.get();
  const int ranks = static_cast<int>(candidates.size());
  bool heaps = false;
  memory.base = map_region(std::move(file), ranks, heaps);
  RankSlot& rank_slot =
      SharedRegion(memory.base.get(), ranks).rank_slot(memory.place(rendezvous.rank));
  rank_slot.heap = heaps ? 1 : 0;
  FailureDetector::sign(rank_slot);
  return memory;
}

/// Gives our place up again, before any rank reads which ranks are present.
void leave(const SharedMemory& memory) {
  const SharedRegion region(memory.base.get(), static_cast<int>(memory.members.size()));
  region.rank_slot(memory.place(memory.rank)).process[0] = 0;
}

/// Shares the region: the lowest rank makes it, the others fetch it. Throws Error if we cannot have
/// it.
SharedMemory share(const Rendezvous& rendezvous, const std::vector<int>& candidates,
                   const std::shared_ptr<HostSocket>& announced) {
  SharedMemory memory;
  const int ranks = static_cast<int>(candidates.size());
  const auto make = [&] {
    Fd file = make_region_file(ranks);
    const int fd = file.get();
    memory = join(rendezvous, candidates, std::move(file));
    const bool permits = cma::permit::wanted();
    SharedRegion(memory.base.get(), ranks).header().permits = permits ? 1 : 0;
    return fd;
  };
  const auto take = [&](Fd file) { memory = join(rendezvous, candidates, std::move(file)); };
  try {
    share_file(rendezvous, candidates, {"shm", kName, kOutcomes}, announced, make, take);
  } catch (const Error&) {
    if (memory.base) leave(memory);
    throw;
  }
  return memory;
}

/// If reading each other's memory takes a permit, all ranks give it before any rank reads.
std::shared_ptr<void> permit_reading(const Rendezvous& rendezvous, const SharedMemory& memory) {
  const int self = memory.place(rendezvous.rank), ranks = static_cast<int>(memory.members.size());
  const SharedRegion region(memory.base.get(), ranks);
  if (region.header().permits == 0) return nullptr;
  std::vector<pid_t> processes;
  for (int r = 0; r < ranks; r++) {
    const RankSlot& rank_slot = region.rank_slot(r);
    const auto process = static_cast<pid_t>(rank_slot.process[0]);
    const bool twice = std::count(processes.begin(), processes.end(), process) > 0;
    if (process == 0 || twice) return nullptr;  // memory is not read, as all ranks see
    processes.push_back(process);
  }
  const bool reads = cma::readable(region, self);
  const std::vector<std::string> answers =
      all_gather_values(rendezvous, "shm/reads", memory.members, reads ? kYes : "no");
  if (std::count(answers.begin(), answers.end(), kYes) == ranks) return cma::permit::held();
  std::shared_ptr<void> permit = cma::permit::name(cma::permit::common_ancestor(processes));
  all_gather_values(rendezvous, "shm/permit", memory.members, permit ? kYes : "no");
  return permit;
}

}  // namespace

void ShmSetup::announce(const Rendezvous& rendezvous) {
  pycomm::announce(rendezvous, kSharersTopic, sharers_id());
  std::string name = kUnavailable;
  try {
    socket_ = std::make_shared<HostSocket>();
    name = socket_->name();
  } catch (const Error&) {  // ranks that would share memory with us learn it when they try
  }
  pycomm::announce(rendezvous, kName, name);
}

std::unique_ptr<ShmTransport> ShmSetup::make(const Rendezvous& rendezvous,
                                             const std::vector<int>& ranks) {
  const std::string ours = sharers_id();
  const std::vector<std::string> ids = all_gather_values(rendezvous, kSharersTopic, ranks, ours);
  std::vector<int> candidates;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (ids[i] == ours) candidates.push_back(ranks[i]);
  }
  if (candidates.size() < 2 || candidates.size() > kMaxRanks) return nullptr;

  SharedMemory memory;
  const std::string outcome =
      outcome_of([&] { memory = share(rendezvous, candidates, std::exchange(socket_, nullptr)); });
  const std::vector<std::string> outcomes =
      all_gather_values(rendezvous, kOutcomes, candidates, outcome);
  const auto sharers = std::count(outcomes.begin(), outcomes.end(), kYes);
  if (outcome != kYes) {
    warn_once(
        "rank " + std::to_string(rendezvous.rank) +
        " shares no memory with the other ranks of its host, to which TCP is slower: " + outcome);
  }
  if (outcome != kYes || sharers < 2) return nullptr;
  memory.permit = permit_reading(rendezvous, memory);
  return std::make_unique<ShmTransport>(memory);
}

bool hosts_differ(const Rendezvous& rendezvous) {
  const auto received = rendezvous.exchange->received.find(kSharersTopic);
  if (received == rendezvous.exchange->received.end()) return false;
  const std::set<std::string> hosts(received->second.begin(), received->second.end());
  return hosts.size() == received->second.size();
}

}  // namespace pycomm
