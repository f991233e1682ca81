// Shm transport: ranks are processes of one host, and the shared region is a memory file of the
// lowest of them.
//
// host_id() tells which ranks are candidates, and trying tells which are members: a rank that
// cannot receive or map the file publishes that in the store, and the others go on without it.
//
// Local transport: ranks are threads of one process, and the shared region is plain memory, found
// by its address in the store.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "transports/shared_file.h"
#include "transports/shm/cma.h"
#include "transports/shm/transport.h"

namespace pycomm {
namespace {

constexpr char kName[] = "shm/name";  ///< name of the socket that passes on the region
constexpr char kOutcomes[] = "shm/outcome";
constexpr char kHeaps[] = "shm/heaps";  ///< of a former group (shm/heap.h)
/// The time that ranks may take to fetch each other's handles.
constexpr Milliseconds kHandleWait(5000);

[[noreturn]] void throw_errno(const std::string& what) {
  throw Error("shm: cannot " + what + ": " + std::generic_category().message(errno));
}

uint64_t random_name() {
  uint64_t name = 0;
  if (::getrandom(&name, sizeof name, 0) != sizeof name) throw_errno("get random bytes");
  return name;
}

/// Returns the largest file that this process may make: `ulimit -f`, which also limits memory
/// files.
size_t largest_file() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return static_cast<size_t>(limit.rlim_cur);
}

/// Makes the file, with heaps unless there are some, if a file may be so large.
Fd make_region_file(int ranks, bool heaps) {
  size_t bytes = heaps ? SharedRegion::bytes_with_heaps(ranks) : SharedRegion::bytes(ranks);
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
  if (base == MAP_FAILED) throw_errno("map the shared memory");
  keep_out_of_dumps(base, bytes);
  const int fd = file.release();
  return {base, [bytes, fd, device = info.st_dev, inode = info.st_ino](void* memory) {
            ::munmap(memory, bytes);
            // Other code may have closed the descriptor, and its number may be another file's now.
            struct stat now = {};
            if (::fstat(fd, &now) == 0 && now.st_dev == device && now.st_ino == inode) ::close(fd);
          }};
}

/// The heaps of a former group, if the candidates keep them, and the number of ours.
struct Kept {
  std::shared_ptr<const KeptHeaps> heaps;
  uint32_t number = 0;
};

/// All candidates come to the same result, since they see the same values.
Kept kept_heaps(const Rendezvous& rendezvous, const std::vector<int>& candidates,
                const std::shared_ptr<const KeptHeaps>& ours) {
  const std::vector<std::string> values =
      all_gather_values(rendezvous, kHeaps, candidates, KeptHeaps::value(ours.get()));
  if (KeptHeaps::numbers(values).empty()) return {};
  if (!ours) {
    throw Error("shm: rank " + std::to_string(rendezvous.rank) +
                " keeps no memory of a former group, and the store says that it does: somebody "
                "else writes to the store; set PYCOMM_SECRET, and let nobody else reach the store");
  }
  return {ours, ours->own};
}

/// Maps the region and takes our place in it.
SharedMemory join(const Rendezvous& rendezvous, const std::vector<int>& candidates, Fd file,
                  const Kept& kept) {
  SharedMemory memory;
  memory.members = candidates;
  memory.rank = rendezvous.rank;
  memory.file = file.get();
  const int ranks = static_cast<int>(candidates.size());
  bool heaps = false;
  memory.base = map_region(std::move(file), ranks, heaps);
  RankSlot& rank_slot =
      SharedRegion(memory.base.get(), ranks).rank_slot(memory.place(rendezvous.rank));
  if (kept.heaps) {
    memory.heaps = kept.heaps;
    rank_slot.heap = kept.number + 1;
  } else if (heaps) {
    rank_slot.heap = static_cast<uint32_t>(memory.place(rendezvous.rank)) + 1;
  }
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
                   const Kept& kept, const std::shared_ptr<HostSocket>& announced) {
  SharedMemory memory;
  const int ranks = static_cast<int>(candidates.size());
  const auto make = [&] {
    Fd file = make_region_file(ranks, !kept.heaps);
    const int fd = file.get();
    memory = join(rendezvous, candidates, std::move(file), kept);
    Header& header = SharedRegion(memory.base.get(), ranks).header();
    header.permits = cma::permit::wanted() ? 1 : 0;
    header.heaps_name = random_name();
    return fd;
  };
  const auto take = [&](Fd file) { memory = join(rendezvous, candidates, std::move(file), kept); };
  try {
    share_file(rendezvous, candidates, {"shm", kName, kOutcomes}, announced, make, take);
  } catch (const Error&) {
    if (memory.base) leave(memory);
    throw;
  }
  return memory;
}

/// Fetches descriptors of the processes that we do not see, since they are in another PID namespace
/// than ours. Each rank passes on its own; a rank that gets none learns of a death by deadlines
/// alone.
FailureDetector::Handles fetch_handles(const Rendezvous& rendezvous, const SharedMemory& memory) {
  const int self = memory.place(rendezvous.rank), ranks = static_cast<int>(memory.members.size());
  const SharedRegion region(memory.base.get(), ranks);
  std::vector<int> sharers;
  std::vector<int> foreign;
  for (int r = 0; r < ranks; r++) {
    if (!region.present(r)) continue;
    sharers.push_back(memory.members[static_cast<size_t>(r)]);
    const bool sees = FailureDetector::visible(region.rank_slot(self), region.rank_slot(r));
    if (r != self && !sees) foreign.push_back(r);
  }
  FailureDetector::Handles handles;
  const Fd own(PidFd::of_self());
  // All ranks see all rank slots, so either all or none of them exchange names.
  bool all_visible = true;
  for (const int rank : sharers) {
    const RankSlot& rank_slot = region.rank_slot(memory.place(rank));
    all_visible = all_visible &&
                  FailureDetector::visible(region.rank_slot(memory.place(sharers[0])), rank_slot);
  }
  if (all_visible) return handles;
  std::unique_ptr<HostSocket> server;
  if (own) server = std::make_unique<HostSocket>();
  const std::vector<std::string> names =
      all_gather_values(rendezvous, "shm/handle", sharers, server ? server->name() : kUnavailable);
  const Deadline handle_deadline =
      Deadline::after(std::min(kHandleWait, rendezvous.deadline.left()));
  std::thread serving([&] {
    try {
      for (size_t served = 0; server && served < foreign.size() && !handle_deadline.expired();) {
        served += server->serve(own.get(), rendezvous.poll_interval()) ? 1 : 0;
      }
    } catch (const Error&) {  // the others go without
      server.reset();
    }
  });
  for (const int place : foreign) {
    const auto rank = std::find(sharers.begin(), sharers.end(), memory.members[place]);
    const std::string& name = names[static_cast<size_t>(rank - sharers.begin())];
    if (name == kUnavailable) continue;
    try {
      handles[place] = std::make_shared<PidFd>(receive_fd(name, handle_deadline).release());
    } catch (const Error&) {  // the group goes on without
    }
  }
  serving.join();
  return handles;
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
    // In these cases memory is not read, as all ranks see.
    if (process == 0 || twice || !FailureDetector::visible(region.rank_slot(0), rank_slot))
      return nullptr;
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
  pycomm::announce(rendezvous, kHostIdTopic, host_id());
  pycomm::announce(rendezvous, kHeaps, KeptHeaps::value(kept_.get()));
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
  const std::string host = host_id();
  const std::vector<std::string> hosts = all_gather_values(rendezvous, kHostIdTopic, ranks, host);
  std::vector<int> candidates;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (hosts[i] == host) candidates.push_back(ranks[i]);
  }
  if (candidates.size() < 2 || candidates.size() > kMaxRanks) return nullptr;

  const Kept kept = kept_heaps(rendezvous, candidates, kept_);
  SharedMemory memory;
  const std::string outcome = outcome_of(
      [&] { memory = share(rendezvous, candidates, kept, std::exchange(socket_, nullptr)); });
  const std::vector<std::string> outcomes =
      all_gather_values(rendezvous, kOutcomes, candidates, outcome);
  const auto sharers = std::count(outcomes.begin(), outcomes.end(), kYes);
  if (outcome != kYes || sharers < 2) return nullptr;
  memory.handles = fetch_handles(rendezvous, memory);
  memory.permit = permit_reading(rendezvous, memory);
  return std::make_unique<ShmTransport>("shm", memory);
}

bool hosts_differ(const Rendezvous& rendezvous) {
  const auto received = rendezvous.exchange->received.find(kHostIdTopic);
  if (received == rendezvous.exchange->received.end()) return false;
  const std::set<std::string> hosts(received->second.begin(), received->second.end());
  return hosts.size() == received->second.size();
}

namespace {

/// Maps the region for `ranks` holders; the last one to release it unmaps it.
void* map_memory(int ranks) {
  const auto map = [](size_t bytes) {
    // The mapping is shared, since only then can a heap give pages back.
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  size_t bytes = SharedRegion::bytes_with_heaps(ranks);
  void* base = map(bytes);
  const bool heaps = base != MAP_FAILED;
  if (!heaps) base = map(bytes = SharedRegion::bytes(ranks));
  if (base == MAP_FAILED)
    throw Error("local: no memory is left for the shared region of " + std::to_string(ranks) +
                " ranks; free some, or raise the limit of address space (ulimit -v)");
  keep_out_of_dumps(base, bytes);
  const SharedRegion region(base, ranks);
  region.header().mapped_bytes = bytes;
  for (int r = 0; r < ranks; r++)
    region.rank_slot(r).heap = heaps ? static_cast<uint32_t>(r) + 1 : 0;
  // All holders are counted from the start, so that the region stays for ranks that are late.
  region.header().holders.store(ranks);
  return base;
}

std::shared_ptr<void> hold(void* base, int ranks) {
  return {base, [ranks, process = ::getpid()](void* memory) {
            if (::getpid() != process) return;  // a forked child holds nothing
            Header& header = SharedRegion(memory, ranks).header();
            if (header.holders.fetch_sub(1) == 1) ::munmap(memory, header.mapped_bytes);
          }};
}

}  // namespace

std::unique_ptr<ShmTransport> make_local(const Rendezvous& rendezvous,
                                         const std::vector<int>& ranks) {
  const int size = static_cast<int>(ranks.size());
  if (size > kMaxRanks) {
    throw Error("local: the group has " + std::to_string(size) +
                " ranks, but the local transport connects at most " + std::to_string(kMaxRanks) +
                "; use transport \"tcp\"");
  }
  void* base = rendezvous.rank == ranks.front() ? map_memory(size) : nullptr;
  // Addresses mean nothing in another process, so each rank publishes its own process.
  const std::string process = std::to_string(::getpid());
  const std::string value = process + " " + std::to_string(reinterpret_cast<uintptr_t>(base));
  const std::vector<std::string> values =
      all_gather_values(rendezvous, "local/region", ranks, value);
  for (size_t r = 0; r < values.size(); r++) {
    if (values[r].compare(0, process.size() + 1, process + " ") != 0) {
      throw Error("local: rank " + std::to_string(ranks[r]) + " is in another process than rank " +
                  std::to_string(rendezvous.rank) +
                  "; the local transport connects threads of one process; use transport \"shm\"");
    }
  }
  const std::string address = values[0].substr(process.size() + 1);
  base = reinterpret_cast<void*>(std::strtoull(address.c_str(), nullptr, 10));

  SharedMemory memory;
  memory.base = hold(base, size);
  memory.members = ranks;
  memory.rank = rendezvous.rank;
  FailureDetector::sign(SharedRegion(base, size).rank_slot(memory.place(rendezvous.rank)));
  all_gather_values(rendezvous, "local/ready", ranks, "yes");
  return std::make_unique<ShmTransport>("local", memory);
}

}  // namespace pycomm
