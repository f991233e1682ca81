// Ranks as processes of one host: the segment is a memfd, which the lowest rank makes and hands to
// the others. Nothing has a name in a file system, so nothing can be left behind.
//
// Who is a candidate is said by host_id(), who is a member is found by trying: a rank that cannot
// get or map the file says so in the store, and the others go on without it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <set>
#include <system_error>

#include "transports/fd_passing.h"
#include "transports/meeting.h"
#include "transports/segment_transport.h"

namespace pycomm {
namespace {

/// What a candidate says once it has the segment; anything else is why it has not.
constexpr char kYes[] = "yes";
constexpr char kName[] = "shm/name";  ///< of the socket that hands out the segment
constexpr char kWords[] = "shm/word";
/// The name that is given when there is no segment.
constexpr char kNobody[] = "nobody";

[[noreturn]] void throw_errno(const std::string& what) {
  throw Error("shm: cannot " + what + ": " + std::generic_category().message(errno));
}

FileDescriptor make_segment(int ranks) {
  FileDescriptor fd(::memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) throw_errno("make a memfd");
  if (::ftruncate(fd.get(), static_cast<off_t>(Segment::bytes_with_heaps(ranks))) != 0) {
    throw_errno("size a memfd");
  }
  // No peer can shrink it under us.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

/// With the heaps, if there are addresses for them.
std::shared_ptr<void> map_segment(FileDescriptor file, int ranks, bool& heaps) {
  size_t bytes = Segment::bytes_with_heaps(ranks);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0 || static_cast<size_t>(info.st_size) != bytes) {
    throw Error("shm: the segment has another size; do all ranks run the same version of pycomm?");
  }
  const auto map = [&] {
    return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(),
                  0);
  };
  void* base = map();
  heaps = base != MAP_FAILED;
  if (!heaps) {
    bytes = Segment::bytes(ranks);
    base = map();
  }
  if (base == MAP_FAILED) throw_errno("map the segment");
  const int fd = file.release();  // closed last: that drops our lock
  return {base, [bytes, fd](void* memory) {
            ::munmap(memory, bytes);
            ::close(fd);
          }};
}

/// Where the maker of a segment, of whom each host has one, says how to get it.
std::string key(const Rendezvous& meeting, const std::vector<int>& candidates) {
  return meeting.group + "/" + kName + "/" + std::to_string(candidates.front());
}

/// Maps the segment and takes our place in it.
SharedMemory join(const Rendezvous& meeting, const std::vector<int>& candidates,
                  FileDescriptor file) {
  SharedMemory memory;
  memory.members = candidates;
  memory.rank = meeting.rank;
  memory.lock_fd = file.get();
  const int ranks = static_cast<int>(candidates.size());
  bool heaps = false;
  memory.base = map_segment(std::move(file), ranks, heaps);
  Watch::lock(memory.lock_fd, memory.place(meeting.rank));
  Board& board = Segment(memory.base.get(), ranks).board(memory.place(meeting.rank));
  board.heaps = heaps;
  Watch::sign(board);
  return memory;
}

bool has_spoken(const Rendezvous& meeting, int rank) {
  const std::string name = meeting.group + "/" + kWords + "/" + std::to_string(rank);
  return meeting.store->find(name).has_value();
}

/// Hands out the file until every other candidate has said how it went.
void hand_out(const Rendezvous& meeting, const std::vector<int>& candidates, FdServer& server,
              int fd) {
  std::set<int> silent(candidates.begin() + 1, candidates.end());
  size_t served = 0;
  while (served < candidates.size() - 1 && !silent.empty() && !meeting.deadline.expired()) {
    if (server.serve(fd, meeting.patience())) {
      served += 1;
      continue;
    }
    meeting.look_out();
    for (auto rank = silent.begin(); rank != silent.end();) {
      rank = has_spoken(meeting, *rank) ? silent.erase(rank) : std::next(rank);
    }
  }
}

/// The lowest rank makes the segment, the others fetch it. Throws Error if we cannot have it.
SharedMemory share(const Rendezvous& meeting, const std::vector<int>& candidates) {
  if (meeting.rank != candidates.front()) {
    const std::string name = word_of(meeting, kName, candidates.front());
    return join(meeting, candidates, receive_fd(name, meeting.deadline));
  }
  try {
    FdServer server;
    FileDescriptor file = make_segment(static_cast<int>(candidates.size()));
    const int fd = file.get();
    SharedMemory memory = join(meeting, candidates, std::move(file));
    meeting.store->set(key(meeting, candidates), server.name());
    hand_out(meeting, candidates, server, fd);
    return memory;
  } catch (const Error&) {
    meeting.store->set(key(meeting, candidates), kNobody);
    throw;
  }
}

}  // namespace

std::unique_ptr<Transport> make_shm(const Rendezvous& meeting, const std::vector<int>& ranks) {
  const std::string host = host_id();
  const std::vector<std::string> hosts = exchange(meeting, "shm/host", ranks, host);
  std::vector<int> candidates;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (hosts[i] == host) candidates.push_back(ranks[i]);
  }
  if (candidates.size() < 2 || candidates.size() > kMaxRanks) return nullptr;

  SharedMemory memory;
  std::string word = kYes;
  try {
    memory = share(meeting, candidates);
  } catch (const Timeout&) {
    throw;
  } catch (const PeerLost&) {
    throw;
  } catch (const Error& problem) {
    word = problem.what();
  }
  const std::vector<std::string> words = exchange(meeting, kWords, candidates, word);
  const auto sharers = std::count(words.begin(), words.end(), kYes);
  if (word != kYes || sharers < 2) return nullptr;
  return std::make_unique<SegmentTransport>("shm", memory);
}

}  // namespace pycomm
