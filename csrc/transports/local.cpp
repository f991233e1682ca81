// Ranks as threads of one process: the segment is plain memory, found by its address in the store.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "transports/meeting.h"
#include "transports/segment_transport.h"

namespace pycomm {
namespace {

/// The segment of `ranks` holders; the last one to let go unmaps it.
void* map_segment(int ranks) {
  const auto map = [](size_t bytes) {
    // Shared, since only then can a heap give pages back.
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  size_t bytes = Segment::bytes_with_heaps(ranks);
  void* base = map(bytes);
  const bool heaps = base != MAP_FAILED;
  if (!heaps) base = map(bytes = Segment::bytes(ranks));
  if (base == MAP_FAILED) throw Error("local: no memory for a segment");
  const Segment segment(base, ranks);
  segment.header().mapped_bytes = bytes;
  for (int r = 0; r < ranks; r++) segment.board(r).heaps = heaps;
  // Promised to all from the start, so that it stays for ranks that come late.
  segment.header().holders.store(ranks);
  return base;
}

std::shared_ptr<void> hold(void* base, int ranks) {
  return {base, [ranks, process = ::getpid()](void* memory) {
            if (::getpid() != process) return;  // a forked child holds nothing
            Header& header = Segment(memory, ranks).header();
            if (header.holders.fetch_sub(1) == 1) ::munmap(memory, header.mapped_bytes);
          }};
}

}  // namespace

std::unique_ptr<Transport> make_local(const Rendezvous& meeting, const std::vector<int>& ranks) {
  const int size = static_cast<int>(ranks.size());
  if (size > kMaxRanks) {
    throw Error("local: " + std::to_string(size) + " ranks; it joins at most " +
                std::to_string(kMaxRanks));
  }
  void* base = meeting.rank == ranks.front() ? map_segment(size) : nullptr;
  // Addresses mean nothing in another process, so each rank names its own.
  const std::string process = std::to_string(::getpid());
  const std::string word = process + " " + std::to_string(reinterpret_cast<uintptr_t>(base));
  const std::vector<std::string> words = exchange(meeting, "local/segment", ranks, word);
  for (size_t r = 0; r < words.size(); r++) {
    if (words[r].compare(0, process.size() + 1, process + " ") != 0) {
      throw Error("local: rank " + std::to_string(ranks[r]) + " is in another process than rank " +
                  std::to_string(meeting.rank) + "; the local transport joins threads, use shm");
    }
  }
  const std::string address = words[0].substr(process.size() + 1);
  base = reinterpret_cast<void*>(std::strtoull(address.c_str(), nullptr, 10));

  SharedMemory memory;
  memory.base = hold(base, size);
  memory.members = ranks;
  memory.rank = meeting.rank;
  Watch::sign(Segment(base, size).board(memory.place(meeting.rank)));
  exchange(meeting, "local/ready", ranks, "yes");
  return std::make_unique<SegmentTransport>("local", memory);
}

}  // namespace pycomm
