#include "transports/watch.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>

#include "core/deadline.h"
#include "core/error.h"

namespace pycomm {
namespace {

constexpr int64_t kCheckEvery = 1000000;  // ns

struct flock one_byte(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

int64_t now_ns() {
  using std::chrono::duration_cast;
  return duration_cast<std::chrono::nanoseconds>(Deadline::Clock::now().time_since_epoch()).count();
}

bool same_process(const Board& a, const Board& b) {
  return a.process[0] == b.process[0] && a.process[1] == b.process[1];
}

}  // namespace

Watch::Watch(const Segment& segment, std::vector<int> members, int self, int lock_fd)
    : segment_(segment), members_(std::move(members)), self_(self), lock_fd_(lock_fd) {
  if (lock_fd_ < 0) return;
  for (int r = 0; r < segment_.ranks(); r++) {
    bool alone = segment_.present(r);
    for (int other = 0; other < segment_.ranks(); other++) {
      alone = alone && (other == r || !same_process(segment_.board(r), segment_.board(other)));
    }
    if (alone && r != self_) watched_.push_back(r);
  }
}

void Watch::lock(int fd, int self) {
  struct flock lock = one_byte(self);
  if (::fcntl(fd, F_SETLK, &lock) != 0) {
    throw Error("shm: cannot lock the shared segment: " + std::generic_category().message(errno));
  }
}

void Watch::sign(Board& board) {
  struct stat space = {};
  ::stat("/proc/self/ns/pid", &space);
  board.process[0] = static_cast<uint64_t>(::getpid());
  board.process[1] = space.st_ino;
  board.address = reinterpret_cast<uint64_t>(&board);
  ::sched_getaffinity(0, sizeof board.cpus, &board.cpus);
}

void Watch::check() {
  if (!aborted()) {
    const int64_t now = now_ns();
    if (now < next_check_.load(std::memory_order_relaxed)) return;
    next_check_.store(now + kCheckEvery, std::memory_order_relaxed);
  }
  check_now();
}

void Watch::check_now() {
  check_deaths();
  if (!aborted()) return;
  const Header& header = segment_.header();
  throw Error("rank " + std::to_string(header.abort_rank) +
              " aborted the group: " + header.abort_reason);
}

bool Watch::died(int rank) const {
  if (std::find(watched_.begin(), watched_.end(), rank) == watched_.end()) return false;
  struct flock lock = one_byte(rank);
  return ::fcntl(lock_fd_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK && !left(rank);
}

bool Watch::stopped(int rank) const {
  const Board& board = segment_.board(rank);
  if (board.process[1] != segment_.board(self_).process[1]) return false;
  std::ifstream file("/proc/" + std::to_string(board.process[0]) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");  // a name may hold anything
  return name_end != std::string::npos && (line[name_end + 2] == 'T' || line[name_end + 2] == 't');
}

void Watch::check_deaths() const {
  for (const int rank : watched_) {
    if (!died(rank)) continue;
    throw PeerLost(member(rank), "rank " + std::to_string(member(rank)) +
                                     " died: its process is gone (seen by rank " +
                                     std::to_string(member(self_)) + "); look at its own log");
  }
}

void Watch::throw_left(int rank) {
  check_now();
  throw PeerLost(member(rank), "rank " + std::to_string(member(rank)) +
                                   " left the group while rank " + std::to_string(member(self_)) +
                                   " still waits for it; let all ranks make the same calls");
}

void Watch::abort(const std::string& reason) noexcept {
  Header& header = segment_.header();
  uint32_t none = Header::kNone;
  if (!header.abort.compare_exchange_strong(none, Header::kWriting)) return;  // the first counts
  header.abort_rank = member(self_);
  const size_t length = std::min(reason.size(), sizeof header.abort_reason - 1);
  std::memcpy(header.abort_reason, reason.data(), length);
  header.abort_reason[length] = 0;
  header.abort.store(Header::kAborted, std::memory_order_release);
  wake_all();
}

void Watch::leave() noexcept {
  // A forked child that runs our destructors is not us.
  if (segment_.board(self_).process[0] != static_cast<uint64_t>(::getpid())) return;
  segment_.board(self_).left.store(1, std::memory_order_release);
  wake_all();
}

void Watch::wake_all() const noexcept {
  for (int r = 0; r < segment_.ranks(); r++) {
    Board& board = segment_.board(r);
    board.posted.ring_now();
    for (Bell& bell : board.moved) bell.ring_now();
  }
}

}  // namespace pycomm
