// Local transport: ranks are threads of one process, and the shared region is plain memory, found
// by its address in the store.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "transports/shm/transport.h"

namespace pycomm {
namespace {

/// Maps the region for `ranks` holders; the last one to release it unmaps it.
void* map_region(int ranks) {
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
  void* base = rendezvous.rank == ranks.front() ? map_region(size) : nullptr;
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
